"""The Parquet files of a data set: opening and making them, with every fault of the disk as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opengem.data.columns import Column, running_sum, to_numpy
from opengem.errors import UserError

UNFINISHED = ".unfinished"
"""folder that marks a data set whose writing has not ended"""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever pyarrow says about an unreadable file into one line."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read ({reason}); mend it, copy it again or make it anew") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); free some space or choose another --out") from error


class File:
    """An open Parquet file whose errors name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path):
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            self.schema_arrow = self._file.schema_arrow
        meta = self._file.metadata
        self.num_rows, self.num_groups = meta.num_rows, meta.num_row_groups
        self._starts = running_sum(np.array([meta.row_group(g).num_rows for g in range(meta.num_row_groups)], np.int64))

    def first_row(self, group: int) -> int:
        return int(self._starts[group])

    def group_rows(self, group: int) -> int:
        return int(self._starts[group + 1] - self._starts[group])

    def read_group(self, group: int, columns: list[str]) -> pa.Table:
        with readable(self.path):
            return self._file.read_row_group(group, columns=columns)

    def time_range(self, group: int) -> tuple[int, int]:
        """Smallest and largest timestamp, from the footer where it has them."""
        meta = self._file.metadata.row_group(group)
        at = next(i for i in range(meta.num_columns) if meta.column(i).path_in_schema == "timestamp")
        statistics = meta.column(at).statistics
        if statistics is not None and statistics.has_min_max:
            return statistics.min, statistics.max
        table = self.read_group(group, ["timestamp"])
        times = to_numpy(table["timestamp"], Column("timestamp", "time"), self.path, self.first_row(group))
        return int(times.min()), int(times.max())


def open_files(folder: Path) -> list[File]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; make the data set with `opengem data ... --out {folder.parent}`")
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise UserError(f"{folder} holds no .parquet file; make the data set again")
    return [File(path) for path in paths]


def check_room(folder: Path, overwrite: bool) -> None:
    """UserError unless a data set may be written to `folder` (see `Writer`)."""
    if folder.is_file():
        raise UserError(f"{folder} is a file, wanted a folder for the data set; choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / UNFINISHED).is_dir():
        if not (folder / "schema.json").is_file():
            raise UserError(f"{folder} is not empty and holds no data set; choose another --out")
        if not overwrite:
            raise UserError(f"{folder} already holds a data set; choose another --out or add --overwrite")


def make_room(folder: Path) -> None:
    """An empty data set that is being written; files of others are left alone."""
    (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
    (folder / "schema.json").unlink(missing_ok=True)
    for part in ("events", "samples", "vocabulary"):
        for old in (folder / part).glob("*.parquet"):
            old.unlink()
    for part in ("events", "samples"):
        (folder / part).mkdir(exist_ok=True)


def parquet_writer(folder: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(folder / "part-00000.parquet", schema, compression="zstd", write_page_checksum=True)
