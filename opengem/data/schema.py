"""What a data set holds: streams of events, features of a sample, labels, splits; stored as `schema.json`.

A data set is a folder:

    schema.json
    events/*.parquet    one row a user, in file-name order: `user`, and for each stream S the list columns `S.timestamp`
                        and `S.<attribute>`, oldest event first. A history is stored once, never once per sample.
    samples/*.parquet   one row an impression, in time order: `user` (row number in events), `cut.<S>` (how many events
                        of stream S were visible), `timestamp`, `weight`, one column per feature, one per label.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from opengem.errors import UserError

FORMAT_VERSION = 1
KINDS = ("id", "ids", "dense", "bits")
ROLES = ("user", "item", "context")


@dataclass(frozen=True)
class Feature:
    """One attribute of an event or one feature of a sample.

    kind: "id" one integer in [0, rows); "ids" a list of them (samples only); "dense" one finite float;
        "bits" a bit mask of `rows` actions (bit i = action i happened).
    rows: number of distinct ids, or of bits; 0 for dense.
    table: name of the embedding table; features of one vocabulary share it (default: the feature's own name).
    role: whose feature it is (samples only). An item feature that shares a table with an event attribute can be
        matched against the history.
    optional: not an input unless the recipe names it (`data.optional_features`).
    """

    name: str
    kind: str = "id"
    rows: int = 0
    table: str = ""
    role: str = "context"
    optional: bool = False

    def __post_init__(self) -> None:
        where = f"schema feature {self.name!r}"
        if not self.name or "." in self.name:
            raise UserError(f"{where}: a name must be non-empty and hold no '.'")
        if self.kind not in KINDS:
            raise UserError(f"{where}: kind is {self.kind!r}, wanted one of {', '.join(KINDS)}")
        if self.role not in ROLES:
            raise UserError(f"{where}: role is {self.role!r}, wanted one of {', '.join(ROLES)}")
        if self.kind == "dense" and self.rows:
            raise UserError(f"{where}: dense features have no rows, got {self.rows}")
        if self.kind != "dense" and self.rows < 1:
            raise UserError(f"{where}: kind {self.kind} needs rows >= 1, got {self.rows}")
        if self.kind == "bits" and self.rows > 62:
            raise UserError(f"{where}: a bit mask holds at most 62 actions, got {self.rows}")
        if self.kind in ("id", "ids") and not self.table:
            object.__setattr__(self, "table", self.name)


@dataclass(frozen=True)
class Stream:
    """One kind of event history; every event has a `timestamp` (int64 seconds) besides these attributes."""

    name: str
    attributes: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or "." in self.name:
            raise UserError(f"schema stream {self.name!r}: a name must be non-empty and hold no '.'")
        for attribute in self.attributes:
            if attribute.kind == "ids":
                raise UserError(f"schema stream {self.name!r}: attribute {attribute.name!r} cannot be a list (ids)")
            if attribute.name == "timestamp":
                raise UserError(f"schema stream {self.name!r}: 'timestamp' is implied, do not list it")
        _no_repeats([a.name for a in self.attributes], f"schema stream {self.name!r} attributes")


def matches(stream: Stream, features: list[Feature]) -> list[tuple[Feature, Feature]]:
    """(event attribute, candidate feature) pairs that share an embedding table, so that equal ids mean the same."""
    candidates = [f for f in features if f.role == "item" and f.kind == "id"]
    return [(a, f) for a in stream.attributes if a.kind == "id" for f in candidates if a.table == f.table]


@dataclass(frozen=True)
class Label:
    """A target in [0, 1]; null where it is not known (a conversion window that is still open), which counts nowhere.

    given: the label is defined only where that other label is 1 (for example convert given click).
    """

    name: str
    given: str = ""

    def counts(self, labels: dict):
        """bool `[N]`: where it counts, that is where it is known (not NaN) and its condition is 1.

        labels: name -> `[N]` of all labels, numpy arrays or tensors.
        """
        known = labels[self.name] == labels[self.name]  # NaN alone differs from itself
        return known & (labels[self.given] == 1) if self.given else known


@dataclass(frozen=True)
class Baseline:
    """A cheap model every run is compared with. kind: "logistic", on dense features, or "trees", on dense features and
    ids (which they split as numbers)."""

    name: str
    kind: str
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in ("logistic", "trees"):
            raise UserError(f"schema baseline {self.name!r}: kind is {self.kind!r}, wanted logistic or trees")


@dataclass(frozen=True)
class Schema:
    """The whole description. `splits`: name -> [first second, last second) of sample timestamps, non-overlapping."""

    name: str
    streams: tuple[Stream, ...]
    features: tuple[Feature, ...]
    labels: tuple[Label, ...]
    splits: dict[str, tuple[int, int]]
    baselines: tuple[Baseline, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        _no_repeats([s.name for s in self.streams], "schema streams")
        _no_repeats([f.name for f in self.features], "schema features")
        _no_repeats([label.name for label in self.labels], "schema labels")
        if not self.labels:
            raise UserError("schema labels: at least one label is needed, got none")
        known = {label.name for label in self.labels}
        for label in self.labels:
            if label.given and label.given not in known - {label.name}:
                raise UserError(f"schema label {label.name!r}: given {label.given!r} is no other label of this schema")
        for split, (start, end) in self.splits.items():
            if start > end:
                raise UserError(f"schema split {split!r}: starts at {start}, after its end {end}")
        for baseline in self.baselines:
            kinds = ("dense", "id") if baseline.kind == "trees" else ("dense",)
            known = {f.name for f in self.features if f.kind in kinds}
            missing = [name for name in baseline.features if name not in known]
            if missing:
                where, wanted = f"schema baseline {baseline.name!r}", " or ".join(kinds)
                raise UserError(f"{where}: {missing} are no {wanted} features of this schema")
        rows: dict[str, int] = {}
        for feature in self.id_features():
            if rows.setdefault(feature.table, feature.rows) != feature.rows:
                raise UserError(
                    f"schema table {feature.table!r}: feature {feature.name!r} has {feature.rows} rows, "
                    f"another feature of that table {rows[feature.table]}; give both the same number"
                )

    def id_features(self) -> list[Feature]:
        """Every event attribute and sample feature of kind id or ids."""
        attributes = [a for stream in self.streams for a in stream.attributes]
        return [f for f in [*attributes, *self.features] if f.kind in ("id", "ids")]

    def tables(self) -> dict[str, int]:
        """Table name -> rows, in order of first use."""
        return {f.table: f.rows for f in self.id_features()}

    def stream(self, name: str) -> Stream:
        return next(s for s in self.streams if s.name == name)

    def save(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=2)
        (Path(folder) / "schema.json").write_text(text + "\n")

    @classmethod
    def load(cls, folder: Path) -> Schema:
        """Read `folder/schema.json`. Raises UserError when the folder, the file or an entry is missing or wrong."""
        path = Path(folder) / "schema.json"
        if not Path(folder).is_dir():
            raise UserError(f"data folder {folder} does not exist; make one with `opengem data ... --out {folder}`")
        if not path.is_file():
            raise UserError(f"{folder} has no schema.json, so it is no OpenGEM data set; use `opengem data import`")
        try:
            raw = json.loads(path.read_text())
        except ValueError as error:  # also bytes that are no UTF-8
            raise UserError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise UserError(f"{path}: wanted a JSON object, got {type(raw).__name__}; see docs/data.md for the layout")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict, where: str = "schema") -> Schema:
        """Build from the parsed JSON; unknown or missing keys raise UserError naming `where`."""
        raw = dict(raw)
        version = raw.pop("format", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise UserError(f"{where}: format {version}, this version reads format {FORMAT_VERSION}")
        try:
            streams = tuple(
                Stream(s["name"], tuple(Feature(**a) for a in s.get("attributes", ()))) for s in raw.pop("streams")
            )
            features = tuple(Feature(**f) for f in raw.pop("features"))
            labels = tuple(Label(**label) for label in raw.pop("labels"))
            splits = {name: (int(a), int(b)) for name, (a, b) in raw.pop("splits").items()}
            baselines = tuple(Baseline(b["name"], b["kind"], tuple(b["features"])) for b in raw.pop("baselines", ()))
            return cls(baselines=baselines, streams=streams, features=features, labels=labels, splits=splits, **raw)
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{where}: {error} (a missing or unknown key); see docs/data.md for the layout") from error


def _no_repeats(names: list[str], where: str) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise UserError(f"{where}: {', '.join(sorted(repeated))} stands more than once")
