"""The description `opengem data import` reads: which files hold events and samples, and what their columns mean.

It is one JSON file; docs/data.md shows a full example. Everything in it is checked here, before any data is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from opengem.data.columns import nearest
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.errors import UserError

TIME_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
OPEN_START, OPEN_END = -(2**62), 2**62
OPEN_ROWS = 2**62
"""rows of a feature whose vocabulary is still to be built"""


@dataclass(frozen=True)
class Field:
    """An event attribute or a sample feature and where it comes from.

    feature: as in the schema; rows = OPEN_ROWS means that a vocabulary is built (kinds id and ids).
    columns: one, or for bits possibly several 0/1 columns, column i giving bit i.
    fill: stands in for a missing number (None: a missing number is an error).
    separator: between the ids of a text list.
    """

    feature: Feature
    columns: tuple[str, ...]
    fill: float | None = None
    separator: str = ""

    @property
    def column(self) -> str:
        return self.columns[0]

    @property
    def content(self) -> str:
        if self.has_vocabulary or self.feature.kind == "ids":
            return "text"
        return "number" if self.feature.kind == "dense" else "integer"

    @property
    def has_vocabulary(self) -> bool:
        return self.feature.kind in ("id", "ids") and self.feature.rows == OPEN_ROWS


@dataclass(frozen=True)
class Source:
    """Files of one kind (a stream's events, or the samples) and their columns.

    sort: order the rows by time after reading them all. distinct: keep one of identical events of a user.
    weight: column of sample weights ("" for none). labels: (label, its column); samples only, like weight.
    """

    where: str
    files: tuple[Path, ...]
    user: str
    time: str
    fields: tuple[Field, ...]
    sort: bool = False
    distinct: bool = False
    weight: str = ""
    labels: tuple[tuple[Label, str], ...] = ()

    @property
    def columns(self) -> dict[str, str]:
        """Every column that is read -> what it holds: integer, number, time or text (ids, and columns of two uses)."""
        uses = [(column, field.content) for field in self.fields for column in field.columns]
        uses += [(column, "number") for _, column in self.labels]
        uses += [(self.weight, "number")] if self.weight else []
        out: dict[str, str] = {}
        for column, content in uses:
            out[column] = content if out.get(column, content) == content else "text"
        return {**out, self.user: "text", self.time: "time"}


@dataclass(frozen=True)
class Spec:
    """A whole description. units_per_s: divides integer times to give seconds."""

    name: str
    streams: dict[str, Source]
    samples: Source
    splits: dict[str, tuple[int, int]]
    units_per_s: int

    @property
    def vocabulary_end(self) -> int:
        """Ids first seen at or after this second are unknown (id 0): the end of the split `train`."""
        return self.splits["train"][1]

    def schema(self, rows: dict[str, int]) -> Schema:
        """The data set's schema, with the sizes of the vocabularies filled in (table -> rows)."""

        def sized(field: Field) -> Feature:
            f = field.feature
            size = rows[f.table] if field.has_vocabulary else f.rows
            return Feature(f.name, f.kind, size, f.table, f.role, f.optional)

        streams = tuple(Stream(n, tuple(sized(f) for f in s.fields)) for n, s in self.streams.items())
        features = tuple(sized(f) for f in self.samples.fields)
        return Schema(self.name, streams, features, tuple(label for label, _ in self.samples.labels), self.splits)


def load_spec(path: Path) -> Spec:
    """Read and check a description; files are found relative to its folder. UserError names file, key and rule."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; write a description of your files, see docs/data.md")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    top = _Keys(raw, str(path))
    unit = top.take("time_unit", str, "s")
    if unit not in TIME_UNITS:
        raise UserError(f"{path}: time_unit is {unit!r}, wanted one of {', '.join(TIME_UNITS)}")
    streams = {}
    for name, entry in top.take("events", dict, {}).items():
        streams[name] = _source(_Keys(entry, f"{path}: events.{name}"), path.parent, "attributes", is_samples=False)
    samples = _source(_Keys(top.take("samples", dict), f"{path}: samples"), path.parent, "features", is_samples=True)
    splits = {n: _split(pair, f"{path}: splits.{n}") for n, pair in top.take("splits", dict).items()}
    by_start = sorted(splits.items(), key=lambda item: item[1])
    for (name, (_, end)), (later, (start, _)) in zip(by_start, by_start[1:], strict=False):
        if start < end:
            raise UserError(f"{path}: splits {name!r} and {later!r} overlap; end one before the other starts")
    if "train" not in splits:
        raise UserError(f"{path}: splits has no 'train', whose end closes the vocabularies; add it")
    spec = Spec(top.take("name", str, path.stem), streams, samples, splits, TIME_UNITS[unit])
    top.done()
    _check_tables(spec, path)
    return spec


def _check_tables(spec: Spec, path: Path) -> None:
    """Rules over several entries: the schema's own, and one way of numbering per table."""
    fields = [f for s in (*spec.streams.values(), spec.samples) for f in s.fields if f.feature.table]
    sizes: dict[str, int] = {}
    for field in fields:
        if sizes.setdefault(field.feature.table, field.feature.rows) != field.feature.rows:
            raise UserError(
                f"{path}: features of table {field.feature.table!r} must all have the same rows, or all none (then a "
                f"vocabulary is built); {field.feature.name!r} differs"
            )
    spec.schema({f.feature.table: 1 for f in fields})


def _source(keys: _Keys, folder: Path, fields_key: str, is_samples: bool) -> Source:
    pattern = keys.take("files", str)
    files = tuple(sorted(folder.glob(pattern))) if not Path(pattern).is_absolute() else _absolute(pattern)
    if not files:
        raise UserError(f"{keys.where}.files: {pattern!r} matches no file in {folder}")
    fields = keys.take(fields_key, dict, {})
    labels = keys.take("labels", dict) if is_samples else {}
    source = Source(
        where=keys.where,
        files=files,
        user=keys.take("user", str, "user"),
        time=keys.take("time", str, "timestamp"),
        fields=tuple(_field(n, _Keys(f, f"{keys.where}.{fields_key}.{n}"), is_samples) for n, f in fields.items()),
        sort=keys.take("sort", bool, False),
        distinct=not is_samples and keys.take("distinct", bool, False),
        weight=keys.take("weight", str, "") if is_samples else "",
        labels=tuple(_label(n, _Keys(e, f"{keys.where}.labels.{n}")) for n, e in labels.items()),
    )
    keys.done()
    return source


def _absolute(pattern: str) -> tuple[Path, ...]:
    path = Path(pattern)
    return tuple(sorted(path.parent.glob(path.name)))


def _field(name: str, keys: _Keys, is_sample: bool) -> Field:
    """One field; a key that means nothing for its kind is unknown."""
    kind = keys.take("kind", str, "id")
    columns = tuple(keys.take("columns", list, [])) if kind == "bits" else ()
    if not all(isinstance(c, str) for c in columns):
        raise UserError(f"{keys.where}.columns is {list(columns)}, wanted names of columns")
    rows = len(columns) if columns or kind == "dense" else keys.take("rows", int, 0)
    is_id = kind in ("id", "ids")
    feature = Feature(
        name,
        kind,
        OPEN_ROWS if is_id and not rows else rows,
        keys.take("table", str, "") if is_id else "",
        keys.take("role", str, "context") if is_sample else "context",
        is_sample and keys.take("optional", bool, False),
    )
    field = Field(
        feature,
        columns or (keys.take("column", str, name),),
        keys.take("fill", float, None) if kind == "dense" else None,
        keys.take("separator", str, "|") if kind == "ids" else "",
    )
    keys.done()
    return field


def _label(name: str, keys: _Keys) -> tuple[Label, str]:
    label, column = Label(name, keys.take("given", str, "")), keys.take("column", str, name)
    keys.done()
    return label, column


def _split(raw, where: str) -> tuple[int, int]:
    if not isinstance(raw, list) or len(raw) != 2:
        raise UserError(f"{where} is {raw!r}, wanted [start, end]: seconds, ISO dates (UTC) or null for open")
    ends = [_second(v, where) for v in raw]
    return (OPEN_START if ends[0] is None else ends[0], OPEN_END if ends[1] is None else ends[1])


def _second(value, where: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: {value!r} is no time; write seconds or an ISO date such as 2017-11-01") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


class _Keys:
    """The entries of one JSON object, taken one by one; what is left over at the end is an error."""

    _REQUIRED = object()

    def __init__(self, raw, where: str) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{where} is {raw!r}, wanted an object {{...}}")
        self._raw, self._known, self.where = raw, [], where

    def take(self, key: str, kind: type, default=_REQUIRED):
        self._known.append(key)
        value = self._raw.get(key, default)
        if value is self._REQUIRED:
            raise UserError(f"{self.where}: {key!r} is missing; it has {', '.join(self._raw) or 'no keys'}")
        if value is default:
            return value
        numeric = kind is float and isinstance(value, int)
        if not (isinstance(value, kind) or numeric) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.where}.{key} is {value!r}, wanted {kind.__name__}")
        return value

    def done(self) -> None:
        for key in self._raw:
            if key not in self._known:
                raise UserError(f"{self.where}: unknown key {key!r}{nearest(key, self._known)}")
