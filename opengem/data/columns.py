"""The columns of a data set: which ones the schema asks for, their types, and the checks every value passes.

`store.py` reads and writes whole data sets with these. All errors are one-line UserErrors that name the place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from opengem.data.schema import Feature, Schema
from opengem.errors import UserError

INTEGER_KINDS = ("id", "ids", "bits", "time", "count")


class Lists(NamedTuple):
    """A list per row: row `i` holds `values[offsets[i]:offsets[i + 1]]`; `offsets` is int64 `[N + 1]`."""

    offsets: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> Lists:
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        offsets = running_sum(lengths)
        return Lists(offsets, self.values[spans(starts, lengths, offsets)])


def running_sum(lengths: np.ndarray) -> np.ndarray:
    """int64 `[N + 1]`: 0 and the running sum."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def spans(starts: np.ndarray, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 `[offsets[-1]]`: starts[0], starts[0] + 1, ... for lengths[0] entries, then the same for the next."""
    index = np.arange(offsets[-1], dtype=np.int64)
    index += np.repeat(starts - offsets[:-1], lengths)
    return index


@dataclass(frozen=True)
class Column:
    """One column of a file.

    name: as in the file ("item", "cut.view", "view.item").
    kind: a feature kind (id, ids, dense, bits), or label, weight, time (seconds) or count (an integer >= 0).
    rows, table: as in `Feature`. listed: the file holds a list per row.
    """

    name: str
    kind: str
    rows: int = 0
    table: str = ""
    listed: bool = False

    @property
    def dtype(self) -> type:
        """numpy dtype in memory: ids int32 where the table allows it, other integers int64, numbers float32."""
        if self.kind in ("id", "ids"):
            return np.int32 if self.rows <= 2**31 else np.int64
        return np.int64 if self.kind in INTEGER_KINDS else np.float32

    def check(self, values: np.ndarray, place: Callable[[int], str]) -> None:
        """Raise UserError at the first illegal value; `place(i)` tells where value `i` came from."""
        if self.kind == "time" or not len(values):
            return
        low, high = self._range()
        bad = ~((values >= low) & (values <= high))  # written so that NaN is bad
        if bad.any():
            at = int(bad.argmax())
            raise UserError(f"{place(at)}: column {self.name!r}: {self._complaint(values[at])}")

    def _range(self) -> tuple[float, float]:
        if self.kind in ("id", "ids"):
            return 0, self.rows - 1
        if self.kind == "bits":
            return 0, 2**self.rows - 1
        if self.kind == "label":
            return 0.0, 1.0
        largest = float(np.finfo(np.float32).max)
        return {"dense": (-largest, largest), "weight": (0.0, largest), "count": (0, 2**62)}[self.kind]

    def _complaint(self, value) -> str:
        if self.kind in ("id", "ids"):
            return (
                f"id {value} is outside table {self.table!r} of {self.rows} rows (0 to {self.rows - 1}); "
                "map unknown ids to 0 or give the table more rows in schema.json"
            )
        return {
            "bits": f"{value} is no mask of {self.rows} bits; give the feature more rows in schema.json",
            "label": f"label {value} is outside [0, 1]; scale it or drop the row",
            "dense": f"{value} is not a finite float32; fill missing values before the import",
            "weight": f"weight {value} must be finite and >= 0",
            "count": f"{value} must be >= 0",
        }[self.kind]


def event_columns(schema: Schema, stream: str) -> list[Column]:
    """`S.timestamp` and `S.<attribute>` of one stream, all listed."""
    attributes = [_of_feature(a, f"{stream}.", listed=True) for a in schema.stream(stream).attributes]
    return [Column(f"{stream}.timestamp", "time", listed=True), *attributes]


def sample_columns(schema: Schema) -> list[Column]:
    """Every column of the samples: user, cuts, timestamp, weight, features, labels."""
    cuts = [Column(f"cut.{s.name}", "count") for s in schema.streams]
    features = [_of_feature(f, "", listed=f.kind == "ids") for f in schema.features]
    labels = [Column(label.name, "label") for label in schema.labels]
    return [Column("user", "count"), *cuts, Column("timestamp", "time"), Column("weight", "weight"), *features, *labels]


def _of_feature(feature: Feature, prefix: str, listed: bool) -> Column:
    return Column(prefix + feature.name, feature.kind, feature.rows, feature.table, listed)


def check_arrow_schema(found: pa.Schema, wanted: Iterable[Column], file: Path | str, extra: Iterable[str] = ()) -> None:
    """The file has exactly the wanted columns (and `extra` ones), each of a fitting type; else UserError."""
    wanted = {c.name: c for c in wanted}
    for name, column in wanted.items():
        if name not in found.names:
            raise UserError(f"{file} has no column {name!r}, which schema.json asks for{nearest(name, found.names)}")
        kind = found.field(name).type
        if not _fits(kind, column):
            number = "an integer" if column.kind in INTEGER_KINDS else "a number"
            what = f"a list of {number}s".replace("an integers", "integers").replace("a numbers", "numbers")
            raise UserError(f"{file}: column {name!r} has type {kind}, wanted {what if column.listed else number}")
    for name in found.names:
        if name not in wanted and name not in extra:
            raise UserError(f"{file}: unknown column {name!r}, schema.json does not name it{nearest(name, wanted)}")


def _fits(kind: pa.DataType, column: Column) -> bool:
    if column.listed:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return False
        kind = kind.value_type
    return pa.types.is_integer(kind) or (column.kind not in INTEGER_KINDS and pa.types.is_floating(kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or "; known: ..." for an error message."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known[:20]) or 'none'}"


def to_numpy(chunks: pa.ChunkedArray, column: Column, file: Path | str, first_row: int = 0) -> np.ndarray | Lists:
    """A checked numpy column of `column.dtype`; lists become `Lists`. `first_row` is added to rows in errors."""
    if chunks.null_count and column.kind == "label":  # a label that is not known yet
        unknown = np.asarray(chunks.is_null())
        return np.where(unknown, np.float32("nan"), to_numpy(chunks.fill_null(0), column, file, first_row))
    if chunks.null_count:
        raise UserError(_null(chunks, column, file, first_row))
    if not column.listed:
        values = _join([np.asarray(c) for c in chunks.chunks], column)
        column.check(values, lambda i: f"{file}, row {first_row + i}")
        return values.astype(column.dtype, copy=False)
    lengths = _join([np.diff(np.asarray(c.offsets)) for c in chunks.chunks], column)
    items = [c.values.slice(c.offsets[0].as_py(), c.offsets[-1].as_py() - c.offsets[0].as_py()) for c in chunks.chunks]
    offsets = running_sum(lengths)
    if any(i.null_count for i in items):
        raise UserError(f"{file}: column {column.name!r} has a null inside a list; fill missing values")
    values = _join([np.asarray(i) for i in items], column)

    def place(i: int) -> str:
        row = int(np.searchsorted(offsets, i, "right")) - 1
        return f"{file}, row {first_row + row}, entry {i - int(offsets[row])}"

    column.check(values, place)
    return Lists(offsets, values.astype(column.dtype, copy=False))


def _join(parts: list[np.ndarray], column: Column) -> np.ndarray:
    if not parts:
        return np.zeros(0, column.dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _null(chunks: pa.ChunkedArray, column: Column, file: Path | str, first_row: int) -> str:
    row = first_row + int(np.argmax(np.asarray(chunks.is_null())))
    return f"{file}, row {row}: column {column.name!r} is null; fill missing values before the import"


def to_arrow(values: np.ndarray | Lists, column: Column, where: str) -> pa.Array:
    """The Arrow array that is written for a column, after the same checks as on reading. A label NaN becomes null."""
    if isinstance(values, Lists) != column.listed:
        wanted = "Lists(offsets, values)" if column.listed else "a plain array"
        raise UserError(f"{where}: column {column.name!r} must be {wanted}, got {type(values).__name__}")
    flat = np.asarray(values.values if column.listed else values)
    if column.kind in INTEGER_KINDS and flat.dtype.kind not in "iu" and len(flat):
        raise UserError(f"{where}: column {column.name!r} holds {flat.dtype}, wanted integers")
    unknown = np.isnan(flat) if column.kind == "label" else None
    column.check(flat if unknown is None else flat[~unknown], lambda i: f"{where}, value {i}")
    array = pa.array(flat.astype(column.dtype, copy=False), mask=unknown)
    if not column.listed:
        return array
    return pa.ListArray.from_arrays(pa.array(values.offsets.astype(np.int32)), array)
