"""Reads the CSV and Parquet files of an import chunk by chunk, and turns their columns into numbers.

A `Chunk` remembers the file and row of each of its values, so that a fault names the place where the user finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from opengem.data.columns import Lists, nearest, running_sum
from opengem.data.files import readable
from opengem.data.spec import Field, Source
from opengem.errors import UserError

CSV_TYPES = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64()}
CHUNK_ROWS = 262_144
LISTED_ROWS = 4_096
"""rows read at a time where a row holds a whole history"""
CSV_BYTES = 1 << 24
"""bytes of a CSV file that are parsed at a time"""
MAX_SECOND = 10**11
"""the year 5138: a larger "second" is a millisecond in disguise"""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file.

    rows: row in the file of each value, counted from 0 and without a header. columns: one Arrow array each, flat.
    listed: the file holds lists, so that several values come from one row.
    """

    path: Path
    rows: np.ndarray
    columns: dict[str, pa.Array]
    listed: bool = False

    def place(self, i: int) -> str:
        return f"{self.path}, row {self.rows[i]}"

    def take(self, order: np.ndarray) -> Chunk:
        indices = pa.array(order)
        return Chunk(self.path, self.rows[order], {n: c.take(indices) for n, c in self.columns.items()})


def chunks(source: Source, columns: dict[str, str]) -> Iterator[Chunk]:
    """All rows of a source in file order, `columns` only. Events stored as lists, one row a user, come out flat.

    columns: as `Source.columns`. A CSV file is read with the types that these ask for, never with guessed ones, but
    for times, which may be integers or text.
    """
    for path in source.files:
        first = 0
        for batch in _batches(path, columns):
            rows = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            arrays = {n: batch.column(i) for i, n in enumerate(batch.schema.names)}
            chunk = Chunk(path, rows, {n: _plain(a) for n, a in arrays.items()})
            yield _explode(chunk, source.user) if _is_list(chunk.columns[source.time]) else chunk


def _batches(path: Path, columns: dict[str, str]) -> Iterator[pa.RecordBatch]:
    name = path.name.removesuffix(".gz")
    with readable(path):
        if name.endswith(".parquet"):
            file = pq.ParquetFile(path)
            _check_names(file.schema_arrow.names, columns, path)
            time = next(n for n, content in columns.items() if content == "time")
            size = LISTED_ROWS if _is_list(file.schema_arrow.field(time)) else CHUNK_ROWS
            yield from file.iter_batches(size, columns=list(columns))
        elif name.endswith((".csv", ".tsv")):
            yield from _csv_batches(path, columns, "\t" if name.endswith(".tsv") else ",")
        else:
            raise UserError(f"{path}: wanted a .parquet, .csv or .tsv file")


def _csv_batches(path: Path, columns: dict[str, str], delimiter: str) -> Iterator[pa.RecordBatch]:
    parse = pacsv.ParseOptions(delimiter=delimiter)
    names = pacsv.open_csv(path, parse_options=parse).schema.names
    _check_names(names, columns, path)
    types = {n: CSV_TYPES[content] for n, content in columns.items() if content in CSV_TYPES}
    convert = pacsv.ConvertOptions(include_columns=list(columns), column_types=types)
    read = pacsv.ReadOptions(block_size=CSV_BYTES)
    try:
        yield from pacsv.open_csv(path, read, parse, convert)
    except pa.ArrowInvalid as error:
        reason = re.sub(r"In CSV column #(\d+)", lambda m: f"column {names[int(m[1])]!r}", str(error).splitlines()[0])
        raise UserError(f"{path} cannot be read: {reason}") from error


def _check_names(found: list[str], wanted: Iterable[str], path: Path) -> None:
    for name in wanted:
        if name not in found:
            raise UserError(f"{path} has no column {name!r}{nearest(name, found)}")


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_list(array: pa.Array | pa.Field) -> bool:
    return pa.types.is_list(array.type) or pa.types.is_large_list(array.type)


def _explode(chunk: Chunk, user: str) -> Chunk:
    """One row a user with list columns -> one row an event."""
    lengths, first, flat = None, "", {}
    for name, array in chunk.columns.items():
        if name == user:
            continue
        if not _is_list(array):
            raise UserError(
                f"{chunk.path}: column {name!r} has type {array.type}, wanted a list as the time column has"
            )
        mine = _list_lengths(array)
        if lengths is None:
            lengths, first = mine, name
        elif (differ := mine != lengths).any():
            at = int(differ.argmax())
            raise UserError(
                f"{chunk.place(at)}: column {name!r} has {mine[at]} entries, {first!r} has {lengths[at]}; "
                "the lists of a row must have one length"
            )
        flat[name] = _plain(pc.list_flatten(array))
    row = np.repeat(np.arange(len(lengths)), lengths)
    flat[user] = chunk.columns[user].take(pa.array(row))
    return Chunk(chunk.path, chunk.rows[row], flat, listed=True)


def sorted_chunks(read: Iterator[Chunk], source: Source, units_per_s: int) -> Iterator[Chunk]:
    """All rows in order of time (they are read into memory first). Places count rows over all files of the source."""
    parts = list(read)
    if not parts:
        return
    table = pa.concat_tables([pa.table(p.columns) for p in parts], promote_options="permissive").combine_chunks()
    order = np.argsort(np.concatenate([seconds(p, source.time, units_per_s) for p in parts]), kind="stable")
    path = parts[0].path if len(source.files) == 1 else parts[0].path.parent / f"({len(source.files)} files)"
    for first in range(0, len(order), CHUNK_ROWS):
        rows = order[first : first + CHUNK_ROWS]
        taken = table.take(pa.array(rows))
        yield Chunk(path, rows, {n: taken[n].combine_chunks() for n in taken.column_names})


def _list_lengths(array: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)


# ---- columns as numbers --------------------------------------------------------------------------------------


def seconds(chunk: Chunk, column: str, units_per_s: int) -> np.ndarray:
    """int64 `[N]`: an integer column divided by `units_per_s`, or a timestamp or date column."""
    array = chunk.columns[column]
    _no_nulls(array, chunk, column)
    kind = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return np.asarray(array).astype("datetime64[s]").astype(np.int64)
    if not pa.types.is_integer(kind):
        raise UserError(
            f"{chunk.path}: column {column!r} has type {kind}, wanted a time: integers, or text like 2017-11-01 08:30"
        )
    values = np.asarray(array).astype(np.int64) // units_per_s
    if (bad := np.abs(values) > MAX_SECOND).any():
        at = int(bad.argmax())
        raise UserError(
            f"{chunk.place(at)}: column {column!r}: second {values[at]} is far off; set time_unit (ms, us, ns)"
        )
    return values


def texts(chunk: Chunk, column: str) -> pa.Array:
    """Ids as text, so that 7 in one file and "7" in another are one id; null where missing or empty."""
    return _as_text(chunk.columns[column], chunk, column)


def text_lists(chunk: Chunk, field: Field) -> tuple[np.ndarray, pa.Array]:
    """(lengths int64 `[N]`, ids as text, flat): a list column, or text with separators."""
    array = chunk.columns[field.column]
    if pa.types.is_null(array.type):
        array = array.cast(pa.string())
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        empty = pc.equal(pc.fill_null(array, ""), "")
        array = pc.if_else(empty, pa.scalar(None, pa.list_(array.type)), pc.split_pattern(array, field.separator))
    if not _is_list(array):
        raise UserError(
            f"{chunk.path}: column {field.column!r} has type {array.type}, wanted a list of ids, or text with "
            f"{field.separator!r} between them"
        )
    return _list_lengths(array), _as_text(_plain(pc.list_flatten(array)), chunk, field.column)


def numbers(chunk: Chunk, column: str, fill: float | None = None) -> np.ndarray:
    """float64 `[N]`; missing and NaN become `fill`, or an error without one."""
    array = _cast(chunk, column, pa.float64())
    if fill is None:
        _no_nulls(array, chunk, column, 'set "fill" for it, for example 0')
    values = array.to_numpy(zero_copy_only=False)
    return values if fill is None else np.where(np.isnan(values), fill, values)


def integers(chunk: Chunk, column: str) -> np.ndarray:
    """int64 `[N]` of a column of ready-made ids, bit masks or flags; missing becomes 0."""
    return np.asarray(pc.fill_null(_cast(chunk, column, pa.int64()), 0))


def _cast(chunk: Chunk, column: str, kind: pa.DataType) -> pa.Array:
    """Numbers, booleans and text that spells numbers, as `kind`; empty text is missing."""
    array = chunk.columns[column]
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_string(array.type):
        array = pc.if_else(pc.equal(array, ""), None, array)
    try:
        return array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{chunk.path}: column {column!r}: wanted {kind}: {str(error).splitlines()[0]}") from error


def bits(chunk: Chunk, columns: tuple[str, ...]) -> np.ndarray:
    """int64 `[N]`: a ready-made mask, or several 0/1 columns of which column i gives bit i."""
    if len(columns) == 1:
        return integers(chunk, columns[0])
    mask = np.zeros(len(chunk.rows), np.int64)
    for i, column in enumerate(columns):
        flags = integers(chunk, column)
        if (bad := (flags != 0) & (flags != 1)).any():
            at = int(bad.argmax())
            raise UserError(f"{chunk.place(at)}: column {column!r}: flag {flags[at]} must be 0 or 1")
        mask |= flags << i
    return mask


def integer_lists(chunk: Chunk, field: Field) -> Lists:
    """Ready-made ids, a list per row."""
    lengths, flat = text_lists(chunk, field)
    try:
        flat = flat.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{chunk.path}: column {field.column!r}: {str(error).splitlines()[0]}; ids with rows are integers"
        ) from error
    return Lists(running_sum(lengths), np.asarray(pc.fill_null(flat, 0)))


def _as_text(array: pa.Array, chunk: Chunk, column: str) -> pa.Array:
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_null(kind) or pa.types.is_large_string(kind):
        array = array.cast(pa.string())
    elif not pa.types.is_string(kind):
        raise UserError(f"{chunk.path}: column {column!r} has type {kind}, wanted ids: text or integers")
    return pc.if_else(pc.equal(array, ""), None, array)


def _no_nulls(array: pa.Array, chunk: Chunk, column: str, fix: str = "every row needs one") -> None:
    if array.null_count:
        at = int(np.argmax(np.asarray(array.is_null())))
        raise UserError(f"{chunk.place(at)}: column {column!r} is missing; {fix}")


class Vocabulary:
    """Text ids -> 1, 2, ... by falling frequency (ties in text order); 0 is every id that was not counted."""

    def __init__(self) -> None:
        self._counts: list[pa.Table] = []
        self._size = 0
        self.values: pa.Array | None = None

    def add(self, ids: pa.Array) -> None:
        counted = pc.value_counts(ids.drop_null())
        self._counts.append(pa.table({"value": counted.field("values"), "count": counted.field("counts")}))
        self._size += len(counted)
        if self._size > 4_000_000:
            self._merge()

    def _merge(self) -> pa.Table:
        empty = pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
        merged = pa.concat_tables([empty, *self._counts]).group_by("value").aggregate([("count", "sum")])
        merged = merged.rename_columns(["value", "count"])
        self._counts, self._size = [merged], 0
        return merged

    def freeze(self) -> pa.Array:
        """Number the ids; returns them, the first one being id 1."""
        ordered = self._merge().sort_by([("count", "descending"), ("value", "ascending")])
        self.values, self._counts = ordered["value"].combine_chunks(), []
        return self.values

    def encode(self, ids: pa.Array) -> np.ndarray:
        """int64 `[N]`."""
        return np.asarray(pc.fill_null(pc.index_in(ids, self.values), -1)).astype(np.int64) + 1
