"""`opengem data import`: any CSV or Parquet logs of events and samples, described by a JSON file, become a data set.

Two passes over the files. The first collects users and vocabularies (ids seen in training time), the second encodes.
Events are held in memory as numbers, as they are in training; samples are streamed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opengem.data.columns import Column, Lists, running_sum
from opengem.data.files import check_room
from opengem.data.source import (
    Chunk,
    Vocabulary,
    bits,
    chunks,
    integer_lists,
    numbers,
    seconds,
    sorted_chunks,
    text_lists,
    texts,
)
from opengem.data.spec import Field, Source, Spec, load_spec
from opengem.data.store import Writer
from opengem.errors import UserError

USERS_PER_WRITE = 65_536


def build(out: Path, *, spec: Path, overwrite: bool = False) -> None:
    """Import CSV or Parquet logs of events and samples.

    out: folder of the data set to make.
    spec: JSON file that says which files hold events and samples and what their columns mean (see docs/data.md).
    overwrite: replace the data set in `out`.
    """
    check_room(Path(out), overwrite)
    description = load_spec(Path(spec))
    users, vocabularies, rows = _collect(description)
    sizes = {table: len(v.values) + 1 for table, v in vocabularies.items()}
    schema = description.schema(sizes)
    print(f"{rows:,} samples, {len(users.values):,} users; ids: {sizes}")
    with Writer(out, schema, overwrite) as writer:
        histories = {n: _read_events(s, description, users, vocabularies) for n, s in description.streams.items()}
        _write_events(writer, histories, users)
        cutters = {name: _Cutter(*history) for name, history in histories.items()}
        for columns in _read_samples(description, users, vocabularies, cutters):
            writer.write_samples(columns)
        _save_vocabularies(Path(out) / "vocabulary", vocabularies)
    events = sum(int(lengths.sum()) for lengths, _ in histories.values())
    print(f"wrote {writer.num_samples:,} samples and {events:,} events to {out}")


# ---- first pass ----------------------------------------------------------------------------------------------


def _collect(spec: Spec) -> tuple[Vocabulary, dict[str, Vocabulary], int]:
    """All users, the ids of training time by table, and the number of samples; checks that no split is empty."""
    users = Vocabulary()
    fields = [f for s in (*spec.streams.values(), spec.samples) for f in s.fields if f.has_vocabulary]
    vocabularies = {f.feature.table: Vocabulary() for f in fields}
    in_split, low, high, rows = dict.fromkeys(spec.splits, 0), None, None, 0
    for source in (*spec.streams.values(), spec.samples):
        mine = [f for f in source.fields if f.has_vocabulary]
        names = {source.user, source.time, *(f.column for f in mine)}
        for chunk in chunks(source, {n: content for n, content in source.columns.items() if n in names}):
            users.add(_users(chunk, source))
            times = seconds(chunk, source.time, spec.units_per_s)
            known = chunk.take(np.flatnonzero(times < spec.vocabulary_end))
            for field in mine:
                ids = texts(known, field.column) if field.feature.kind == "id" else text_lists(known, field)[1]
                vocabularies[field.feature.table].add(ids)
            if source is spec.samples and len(times):
                rows += len(times)
                low = int(times.min()) if low is None else min(low, int(times.min()))
                high = int(times.max()) if high is None else max(high, int(times.max()))
                for name, (start, end) in spec.splits.items():
                    in_split[name] += int(((times >= start) & (times < end)).sum())
    if not rows:
        raise UserError(f"{spec.samples.where}: {', '.join(map(str, spec.samples.files))} hold zero rows")
    for name, count in in_split.items():
        if not count:
            raise UserError(
                f"{spec.samples.where}: split {name!r} {list(spec.splits[name])} has zero rows; times run from {low} "
                f"to {high}; mend splits or time_unit"
            )
    for vocabulary in (users, *vocabularies.values()):
        vocabulary.freeze()
    return users, vocabularies, rows


def _users(chunk: Chunk, source: Source) -> pa.Array:
    ids = texts(chunk, source.user)
    if ids.null_count:
        at = int(np.argmax(np.asarray(ids.is_null())))
        raise UserError(f"{chunk.place(at)}: column {source.user!r} is missing; every row needs a user")
    return ids


# ---- second pass ---------------------------------------------------------------------------------------------


def _encode(chunk: Chunk, field: Field, vocabularies: dict[str, Vocabulary]) -> np.ndarray | Lists:
    """A field's checked values, ids encoded."""
    feature, name = field.feature, field.column
    if field.has_vocabulary:
        vocabulary = vocabularies[feature.table]
        if feature.kind == "id":
            return vocabulary.encode(texts(chunk, name)).astype(np.int32)
        lengths, flat = text_lists(chunk, field)
        return Lists(running_sum(lengths), vocabulary.encode(flat))
    column = Column(name, feature.kind, feature.rows, feature.table)
    if feature.kind == "ids":
        lists = integer_lists(chunk, field)
        column.check(lists.values, lambda i: chunk.place(int(np.searchsorted(lists.offsets, i, "right")) - 1))
        return lists
    values = numbers(chunk, name, field.fill) if feature.kind == "dense" else bits(chunk, field.columns)
    column.check(values, chunk.place)
    return values.astype(column.dtype)


def _read_events(
    source: Source, spec: Spec, users: Vocabulary, vocabularies: dict[str, Vocabulary]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A stream as `Writer.write_events` takes it: (events of each user, columns grouped by user, oldest first)."""
    parts: dict[str, list[np.ndarray]] = {
        n: [] for n in ("user", "timestamp", *(f.feature.name for f in source.fields))
    }
    places: list[Chunk] = []
    for chunk in chunks(source, source.columns):
        parts["user"].append((users.encode(_users(chunk, source)) - 1).astype(np.int32))
        parts["timestamp"].append(seconds(chunk, source.time, spec.units_per_s))
        for field in source.fields:
            parts[field.feature.name].append(_encode(chunk, field, vocabularies))
        places.append(Chunk(chunk.path, chunk.rows, {}, chunk.listed))
    columns = {n: np.concatenate(p) if p else np.zeros(0, np.int64) for n, p in parts.items()}
    user, time = columns["user"], columns["timestamp"]
    if source.distinct:
        order = _first_of_each(columns)
        order = order[np.lexsort((time[order], user[order]))]
    else:
        order = np.lexsort((time, user)) if source.sort else np.argsort(user, kind="stable")
        _check_event_order(user[order], time[order], order, places, source)
    columns = {n: c[order] for n, c in columns.items()}
    return np.bincount(columns.pop("user"), minlength=len(users.values)), columns


def _check_event_order(user, time, order, places: list[Chunk], source: Source) -> None:
    """Each user's events lie in time order in the files; lists of one user on several rows do not overlap in time."""
    same = user[1:] == user[:-1]
    wrong = same & (time[1:] < time[:-1])
    fix = f'sort the file by {source.time!r} or set "sort": true'
    if any(p.listed for p in places):
        row = np.concatenate([p.rows if p.listed else np.zeros_like(p.rows) for p in places])[order]
        overlap = same & (time[1:] == time[:-1]) & (row[1:] != row[:-1])
        wrong, fix = wrong | overlap, f'{fix}, or "distinct": true if the rows repeat histories,'
    if wrong.any():
        at = int(order[int(wrong.argmax()) + 1])
        starts = running_sum(np.array([len(p.rows) for p in places]))
        part = int(np.searchsorted(starts, at, "right")) - 1
        raise UserError(
            f"{places[part].place(at - int(starts[part]))}: this event is not after the same user's event before it; "
            f"{fix} in {source.where}"
        )


def _first_of_each(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Positions of distinct events, the first of each, in the order of the files."""
    order = np.lexsort(tuple(columns.values()))
    new = np.ones(len(order), bool)
    new[1:] = np.any([c[order][1:] != c[order][:-1] for c in columns.values()], axis=0)
    return np.sort(order[new])


def _write_events(writer: Writer, histories: dict, users: Vocabulary) -> None:
    offsets = {name: running_sum(lengths) for name, (lengths, _) in histories.items()}
    for first in range(0, len(users.values), USERS_PER_WRITE):
        last = min(first + USERS_PER_WRITE, len(users.values))
        streams = {
            name: (lengths[first:last], {n: c[offsets[name][first] : offsets[name][last]] for n, c in columns.items()})
            for name, (lengths, columns) in histories.items()
        }
        writer.write_events(streams, users.values[first:last])


class _Cutter:
    """Counts a user's events strictly before a time, for many (user, time) pairs at once."""

    def __init__(self, lengths: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        times = columns["timestamp"]
        self._offsets = running_sum(lengths)
        self._first = int(times.min(initial=0)) if not len(times) else int(times.min())
        self._span = int(times.max()) - self._first + 2 if len(times) else 2
        if len(lengths) * self._span >= 2**62:
            raise UserError(f"event times span {self._span} seconds for {len(lengths)} users; check time_unit")
        user = np.repeat(np.arange(len(lengths)), lengths)
        self._keys = user * self._span + (times - self._first)

    def __call__(self, users: np.ndarray, times: np.ndarray) -> np.ndarray:
        keys = users * self._span + np.clip(times - self._first, 0, self._span - 1)
        return np.searchsorted(self._keys, keys) - self._offsets[users]


def _read_samples(
    spec: Spec, users: Vocabulary, vocabularies: dict[str, Vocabulary], cutters: dict[str, _Cutter]
) -> Iterator[dict[str, np.ndarray | Lists]]:
    """Chunks of samples as `Writer.write_samples` takes them."""
    source, newest = spec.samples, None
    read = chunks(source, source.columns)
    for chunk in sorted_chunks(read, source, spec.units_per_s) if source.sort else read:
        times = seconds(chunk, source.time, spec.units_per_s)
        newest = _check_sample_order(times, newest, chunk, source)
        user = users.encode(_users(chunk, source)) - 1
        columns = {"user": user, "timestamp": times, **{f"cut.{n}": cut(user, times) for n, cut in cutters.items()}}
        for field in source.fields:
            columns[field.feature.name] = _encode(chunk, field, vocabularies)
        for label, column in source.labels:
            values = numbers(chunk, column, fill=np.nan)  # missing: not known
            Column(column, "label").check(np.nan_to_num(values), chunk.place)
            columns[label.name] = values.astype(np.float32)
        if source.weight:
            columns["weight"] = _checked(chunk, Column(source.weight, "weight"))
        yield columns


def _checked(chunk: Chunk, column: Column) -> np.ndarray:
    values = numbers(chunk, column.name)
    column.check(values, chunk.place)
    return values.astype(column.dtype)


def _check_sample_order(times: np.ndarray, newest: int | None, chunk: Chunk, source: Source) -> int | None:
    if not len(times):
        return newest
    falls = np.diff(times, prepend=times[0] if newest is None else newest) < 0
    if falls.any():
        raise UserError(
            f"{chunk.place(int(falls.argmax()))}: this sample is older than the one before it; sort the files by "
            f'{source.time!r} or set "sort": true in {source.where}'
        )
    return int(times[-1])


def _save_vocabularies(folder: Path, vocabularies: dict[str, Vocabulary]) -> None:
    """`vocabulary/<table>.parquet`: id -> the value it stands for (id 0, unknown, is not listed)."""
    folder.mkdir(exist_ok=True)
    for table, vocabulary in vocabularies.items():
        ids = np.arange(1, len(vocabulary.values) + 1)
        pq.write_table(pa.table({"id": ids, "value": vocabulary.values}), folder / f"{table}.parquet")
