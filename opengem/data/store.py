"""A data set on disk: `Writer` makes one, `Events` holds its histories in memory, `Samples` reads its rows lazily.

The folder layout is described in `schema.py`. Both readers check what they read (types, ranges, order), so that a fault
in the data is one clear line and never a wrong number in training.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opengem.data.columns import (
    Column,
    Lists,
    check_arrow_schema,
    event_columns,
    nearest,
    running_sum,
    sample_columns,
    to_arrow,
    to_numpy,
)
from opengem.data.files import UNFINISHED, File, check_room, make_room, open_files, parquet_writer, writable
from opengem.data.groups import Groups
from opengem.data.schema import Schema
from opengem.errors import UserError

ROW_GROUP = 65_536
"""samples of a row group: what a reader decodes at a time"""


class Writer:
    """Writes a data set; `schema.json` comes last, so a killed import is not mistaken for a data set.

    folder: made when missing. A data set in it is replaced with `overwrite`, what a killed import left is replaced in
        any case, and a folder that holds anything else is refused (UserError).
    Use it as a context manager: leaving it without an exception calls `close`.
    """

    def __init__(self, folder: Path | str, schema: Schema, overwrite: bool = False) -> None:
        self.folder, self.schema = Path(folder), schema
        check_room(self.folder, overwrite)
        with writable(self.folder):
            make_room(self.folder)
        self._events: pq.ParquetWriter | None = None
        self._samples: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._last_time = None
        self.num_users = self.num_samples = 0

    def write_events(self, streams: dict[str, tuple[np.ndarray, dict[str, np.ndarray]]], user_ids) -> None:
        """Append users. May be called many times (fewer than 2^31 events of a stream each).

        streams: stream -> (lengths int `[U]`, {"timestamp": `[T]`, attribute: `[T]`}), each user's events oldest first.
        user_ids: `[U]` ints or strings, kept beside the histories. Samples name a user by its row number, counted over
            all calls.
        """
        where = f"events of {self.folder}"
        names = [s.name for s in self.schema.streams]
        if sorted(streams) != sorted(names):
            raise UserError(f"{where}: got streams {sorted(streams)}, schema has {sorted(names)}")
        table = {"user": pa.array(user_ids)}
        for name in names:
            lengths, flat = streams[name]
            offsets = running_sum(np.asarray(lengths))
            if len(lengths) != len(table["user"]):
                raise UserError(f"{where}: stream {name!r} has {len(lengths)} lengths for {len(table['user'])} users")
            _check_order(flat["timestamp"], offsets, lambda row, n=name: f"{where}, user row {row}: stream {n!r}")
            for column in event_columns(self.schema, name):
                values = _named(flat, column.name.split(".", 1)[1], where)
                if len(values) != offsets[-1]:
                    raise UserError(f"{where}: {column.name!r} has {len(values)} values, lengths sum to {offsets[-1]}")
                table[column.name] = to_arrow(Lists(offsets, np.asarray(values)), column, where)
        table = pa.table(table)
        with writable(self.folder):
            if self._events is None:
                self._events = parquet_writer(self.folder / "events", table.schema)
            self._events.write_table(table, row_group_size=8_192)
        self.num_users += len(table)

    def write_samples(self, columns: dict[str, np.ndarray | Lists]) -> None:
        """Append rows in time order. May be called many times; `weight` defaults to 1.

        columns: every column of `sample_columns(schema)`; a feature of kind ids is `Lists(offsets, values)`.
        """
        where = f"samples of {self.folder}"
        times = np.asarray(columns["timestamp"])
        columns = {"weight": np.ones(len(times), np.float32), **columns}
        wanted = sample_columns(self.schema)
        _no_unknown(columns, wanted, where)
        first = times[:1] if self._last_time is None else np.array([self._last_time])
        steps = np.diff(np.concatenate([first, times]))
        if (steps < 0).any():
            at = int((steps < 0).argmax())
            raise UserError(f"{where}, row {self.num_samples + at}: {_unsorted(times[at])}")
        table = pa.table({c.name: to_arrow(_named(columns, c.name, where), c, where) for c in wanted})
        self._last_time = int(times[-1]) if len(times) else self._last_time
        self.num_samples += len(table)
        self._pending.append(table)
        if sum(map(len, self._pending)) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Finish the files and write schema.json. A set without samples is an error."""
        if not self.num_samples:
            raise UserError(f"{self.folder}: zero samples were written; a data set needs at least one row")
        if self._events is None:
            self.write_events({s.name: _no_history(self.schema, s.name) for s in self.schema.streams}, [])
        self._flush()
        with writable(self.folder):
            self._events.close()
            self._samples.close()
            self.schema.save(self.folder / UNFINISHED)
            os.replace(self.folder / UNFINISHED / "schema.json", self.folder / "schema.json")
            (self.folder / UNFINISHED).rmdir()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = pa.concat_tables(self._pending).combine_chunks()
        with writable(self.folder):
            if self._samples is None:
                self._samples = parquet_writer(self.folder / "samples", table.schema)
            self._samples.write_table(table, row_group_size=ROW_GROUP)
        self._pending = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close()


class Events:
    """All histories, in memory, flat.

    offsets: stream -> int64 `[U + 1]`. columns: "stream.attribute" and "stream.timestamp" -> `[T]`, int32/int64 or
    float32. User `u`'s history of stream S is rows `offsets[S][u]` to `offsets[S][u + 1]`, oldest first.
    groups: name of a column of ids -> its rows grouped by id, made when first asked for.
    """

    def __init__(self, offsets: dict[str, np.ndarray], columns: dict[str, np.ndarray], num_users: int) -> None:
        self.offsets, self.columns, self.num_users = offsets, columns, num_users
        self.groups = lru_cache(maxsize=None)(self._make_groups)

    @classmethod
    def open(cls, folder: Path | str, schema: Schema, streams: Iterable[str] | None = None) -> Events:
        """Read `streams` (default: all) of `folder/events`, checking types, ranges and time order."""
        files = open_files(Path(folder) / "events")
        wanted = {s.name: event_columns(schema, s.name) for s in schema.streams}
        for file in files:
            check_arrow_schema(file.schema_arrow, sum(wanted.values(), []), file.path, extra=("user",))
        offsets, columns = {}, {}
        for name in wanted if streams is None else streams:
            for column in wanted[name]:
                lists = _read_lists(files, column)
                first = offsets.setdefault(name, lists.offsets)
                if not np.array_equal(first, lists.offsets):
                    row = int((first != lists.offsets).argmax()) - 1
                    where = f"{folder}/events, user row {row}"
                    raise UserError(f"{where}: {column.name!r} and '{name}.timestamp' differ in length")
                columns[column.name] = lists.values
            times = columns[f"{name}.timestamp"]
            _check_order(times, offsets[name], lambda r, n=name: f"{folder}/events, user row {r}: stream {n!r}")
        return cls(offsets, columns, sum(f.num_rows for f in files))

    def _make_groups(self, column: str) -> Groups:
        return Groups(self.columns[column].astype(np.int64))


class Samples:
    """The rows of `folder/samples`, in time order, decoded by row group when they are asked for (thread-safe).

    num_rows: rows of all files. Every decoded row is checked; with `events`, users and cuts are checked against the
    histories as well, and that no visible event is younger than its sample.
    """

    def __init__(
        self, where: str, files: list[File], columns: list[Column], splits: dict[str, tuple[int, int]],
        events: Events | None, cached_rows: int) -> None:
        self._where, self._columns, self._splits, self._events = where, columns, splits, events
        self._groups = [(file, g) for file in files for g in range(file.num_groups) if file.group_rows(g)]
        self._starts = running_sum(np.array([file.group_rows(g) for file, g in self._groups], np.int64))
        self._cache: OrderedDict[int, dict[str, np.ndarray | Lists]] = OrderedDict()
        self._cached_rows, self._lock = cached_rows, threading.Lock()
        self.num_rows = int(self._starts[-1])
        if not self.num_rows:
            raise UserError(f"{where} has zero rows; a data set needs at least one")
        self._times = self._group_times()

    @classmethod
    def open(
        cls, folder: Path | str, schema: Schema, *, columns: Iterable[str] | None = None,
        events: Events | None = None, cached_rows: int = 4 * ROW_GROUP) -> Samples:
        """Check the files' columns, types and order of time; read no rows yet.

        columns: names to read (default: all). cached_rows: decoded rows kept for the next call.
        """
        files = open_files(Path(folder) / "samples")
        wanted = sample_columns(schema)
        for file in files:
            check_arrow_schema(file.schema_arrow, wanted, file.path)
        if columns is not None:
            columns = set(columns)
            _no_unknown(columns, wanted, f"{folder}/samples")
            always = {"timestamp"} if events is None else {"timestamp", "user"}
            wanted = [c for c in wanted if c.name in columns | always]
        return cls(f"{folder}/samples", files, wanted, schema.splits, events, cached_rows)

    def split(self, name: str) -> tuple[int, int]:
        """[first row, last row) of a split of the schema, by timestamp. Zero rows or an unknown name: UserError."""
        if name not in self._splits:
            raise UserError(f"{self._where}: no split {name!r} in schema.json{nearest(name, self._splits)}")
        start, end = self._splits[name]
        first, last = self._row_at(start), self._row_at(end)
        if first == last:
            low, high = int(self._times[0, 0]), int(self._times[-1, 1])
            raise UserError(
                f"{self._where}: split {name!r} [{start}, {end}) has zero rows; timestamps run from {low} to {high}"
            )
        return first, last

    def read(self, first: int, last: int) -> dict[str, np.ndarray | Lists]:
        """Rows [first, last) as numpy columns (`Lists` for kind ids)."""
        return self.take(np.arange(first, last))

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray | Lists]:
        """The given rows, in the given order."""
        if not len(rows):
            return {c.name: _empty(c) for c in self._columns}
        group_of = np.searchsorted(self._starts, rows, "right") - 1
        parts, order = [], []
        for group in np.unique(group_of):
            at = np.flatnonzero(group_of == group)
            parts.append(_select(self._group(int(group)), rows[at] - self._starts[group]))
            order.append(at)
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order))
        in_order = np.array_equal(back, np.arange(len(back)))
        joined = {c.name: _concatenate([p[c.name] for p in parts]) for c in self._columns}
        return joined if in_order else _select(joined, back)

    # ---- inside ----------------------------------------------------------------------------------------------

    def _group(self, group: int) -> dict[str, np.ndarray | Lists]:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
            self._cache[group] = decoded = self._decode(group)
            while len(self._cache) > 1 and sum(len(d["timestamp"]) for d in self._cache.values()) > self._cached_rows:
                self._cache.popitem(last=False)
            return decoded

    def _decode(self, group: int) -> dict[str, np.ndarray | Lists]:
        file, index = self._groups[group]
        first = file.first_row(index)
        table = file.read_group(index, [c.name for c in self._columns])
        out = {c.name: to_numpy(table[c.name], c, file.path, first) for c in self._columns}
        steps = np.diff(out["timestamp"])
        if (steps < 0).any():
            row = int((steps < 0).argmax()) + 1
            raise UserError(f"{file.path}, row {first + row}: {_unsorted(out['timestamp'][row])}")
        if self._events is not None:
            _check_histories(out, self._events, lambda row: f"{file.path}, row {first + row}")
        return out

    def _group_times(self) -> np.ndarray:
        """int64 `[G, 2]`: first and last timestamp of each row group; checks the order between groups."""
        times = np.array([file.time_range(g) for file, g in self._groups], np.int64).reshape(-1, 2)
        if (wrong := times[1:, 0] < times[:-1, 1]).any():
            file, group = self._groups[int(wrong.argmax()) + 1]
            raise UserError(f"{file.path}, row {file.first_row(group)}: {_unsorted(times[int(wrong.argmax()) + 1, 0])}")
        return times

    def _row_at(self, second: int) -> int:
        """The first row whose timestamp is at least `second`."""
        group = int(np.searchsorted(self._times[:, 1], second))
        if group == len(self._groups):
            return self.num_rows
        return int(self._starts[group]) + int(np.searchsorted(self._group(group)["timestamp"], second))


def _read_lists(files: list[File], column: Column) -> Lists:
    """One list column of all files, joined (one column at a time keeps the peak of memory low)."""
    parts = [
        to_numpy(file.read_group(g, [column.name])[column.name], column, file.path, file.first_row(g))
        for file in files
        for g in range(file.num_groups)
    ]
    return _concatenate(parts) if parts else _empty(column)


def _concatenate(parts: list[np.ndarray | Lists]) -> np.ndarray | Lists:
    if not isinstance(parts[0], Lists):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(p.offsets) for p in parts])
    return Lists(running_sum(lengths), np.concatenate([p.values for p in parts]))


def _select(columns: dict[str, np.ndarray | Lists], rows: np.ndarray) -> dict[str, np.ndarray | Lists]:
    return {n: v.take(rows) for n, v in columns.items()}


def _empty(column: Column) -> np.ndarray | Lists:
    values = np.zeros(0, column.dtype)
    return Lists(np.zeros(1, np.int64), values) if column.listed else values


def _check_order(times: np.ndarray, offsets: np.ndarray, place) -> None:
    """Within each history, timestamps never fall."""
    times = np.asarray(times)
    falls = times[1:] < times[:-1]
    starts = offsets[1:-1]
    falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
    if falls.any():
        at = int(falls.argmax()) + 1
        row = int(np.searchsorted(offsets, at, "right")) - 1
        raise UserError(f"{place(row)}, event {at - int(offsets[row])}: {_unsorted(times[at])}")


def _unsorted(time) -> str:
    return f"timestamp {time} is before the one above it; sort by time, oldest first"


def _check_histories(columns: dict[str, np.ndarray], events: Events, place) -> None:
    """Users exist, cuts lie within their histories, and no visible event is younger than the sample."""
    users = columns["user"]
    if (bad := users >= events.num_users).any():
        at = int(bad.argmax())
        raise UserError(f"{place(at)}: user {users[at]}, but events has {events.num_users} users (0 is the first)")
    for stream in [s for s in events.offsets if f"cut.{s}" in columns]:
        offsets, cuts = events.offsets[stream], columns[f"cut.{stream}"]
        starts = offsets[users]
        lengths = offsets[users + 1] - starts
        if (bad := cuts > lengths).any():
            at = int(bad.argmax())
            raise UserError(
                f"{place(at)}: cut.{stream} is {cuts[at]}, but user {users[at]} has {lengths[at]} events; "
                "a cut counts visible events"
            )
        seen = np.flatnonzero(cuts > 0)
        newest = events.columns[f"{stream}.timestamp"][starts[seen] + cuts[seen] - 1]
        if (bad := newest > columns["timestamp"][seen]).any():
            at = int(seen[bad.argmax()])
            raise UserError(
                f"{place(at)}: cut.{stream} shows an event of second {newest[bad.argmax()]}, after the sample's own "
                f"timestamp {columns['timestamp'][at]}; lower the cut"
            )


def _no_unknown(names: Iterable[str], wanted: list[Column], where: str) -> None:
    known = [c.name for c in wanted]
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"{where}: unknown column {unknown[0]!r}{nearest(unknown[0], known)}")


def _named(columns: dict, name: str, where: str):
    if name not in columns:
        raise UserError(f"{where}: no column {name!r}{nearest(name, columns)}")
    return columns[name]


def _no_history(schema: Schema, stream: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    columns = event_columns(schema, stream)
    return np.zeros(0, np.int64), {c.name.split(".", 1)[1]: np.zeros(0, c.dtype) for c in columns}
