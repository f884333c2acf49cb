"""The import: the documented example runs as documented, and a fault in the user's files is one clear line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opengem.config import DataConfig
from opengem.data import source
from opengem.data.importer import build
from opengem.data.loader import Loader
from opengem.data.schema import Schema
from opengem.data.store import Events, Samples
from opengem.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```", DOCS.read_text(), re.M | re.S)
FILES = {name: text for _, name, text in BLOCKS if name}


@pytest.fixture
def shop(tmp_path):
    for name in ("views.csv", "impressions.csv", "shop.json"):
        (tmp_path / name).write_text(FILES[name])
    return tmp_path


def run(folder: Path, **changes) -> Path:
    """Import with some keys of shop.json changed: run(folder, **{"samples.time": "when"})."""
    spec = json.loads((folder / "shop.json").read_text())
    for path, value in changes.items():
        *parents, key = path.split(".")
        entry = spec
        for parent in parents:
            entry = entry[parent]
        if value is None:
            del entry[key]
        else:
            entry[key] = value
    (folder / "changed.json").write_text(json.dumps(spec))
    build(folder / "out", spec=folder / "changed.json")
    return folder / "out"


def fault(folder: Path, **changes) -> str:
    with pytest.raises(UserError) as error:
        run(folder, **changes)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    assert not (folder / "out/schema.json").exists()
    return text


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def histories(folder: Path) -> dict[str, list]:
    """user id -> [(timestamp, item, price)] of the stream view."""
    schema = Schema.load(folder)
    events = Events.open(folder, schema)
    users = pq.read_table(folder / "events")["user"].to_pylist()
    names = [f"view.{n}" for n in ("timestamp", *(a.name for a in schema.stream("view").attributes))]
    rows = list(zip(*(events.columns[n].tolist() for n in names), strict=True))
    offsets = events.offsets["view"]
    return {u: rows[offsets[i] : offsets[i + 1]] for i, u in enumerate(users)}


# ---- the documented example ----------------------------------------------------------------------------------


def test_the_documented_example(shop, capsys, monkeypatch):
    monkeypatch.chdir(shop)
    build(Path("shop"), spec=Path("shop.json"))
    assert capsys.readouterr().out == FILES["output"]
    schema = Schema.load(Path("shop"))
    batches = {
        name: next(iter(Loader("shop", schema, DataConfig(), max_lengths={"view": 8}, split=name, batch_size=8)))
        for name in schema.splits
    }
    train, test = batches["train"], batches["test"]
    assert [x.tolist() for x in train.sequences["view.item"].to_list()] == [[1], [], [2]]
    assert [x.tolist() for x in test.sequences["view.item"].to_list()] == [[1, 2, 0]]
    assert test.sequences["view.price"].values.tolist() == pytest.approx([3.5, 9.9, 0.0])
    assert train.features["item"].tolist() == [1, 2, 1] and test.features["item"].tolist() == [0]
    assert [x.tolist() for x in train.features["tags"].to_list()] == [[2, 1], [], [1]]
    assert train.labels["click"].tolist() == [1, 0, 1] and train.labels["convert"].tolist() == [0, 0, 1]
    words = pq.read_table("shop/vocabulary/item.parquet")
    assert words.to_pydict() == {"id": [1, 2], "value": ["A7", "B2"]}


def test_the_documented_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [text for language, _, text in BLOCKS if language == "python"]
    exec(compile(code, str(DOCS), "exec"), {})
    assert capsys.readouterr().out == "2 samples\n"


# ---- forms of input ------------------------------------------------------------------------------------------


def test_parquet_with_integer_ids_equals_csv(shop):
    """Arbitrary, large or negative integers are ids like any other; integers and their text are one id."""
    numbers = {"A7": -5, "B2": 2**40, "C9": 12}
    for name in ("views.csv", "impressions.csv"):
        for sku, number in numbers.items():
            edit(shop, name, sku, str(number))
    from_csv = run(shop)
    import pyarrow.csv as pacsv

    pq.write_table(pacsv.read_csv(shop / "views.csv"), shop / "views.parquet")
    assert pq.read_schema(shop / "views.parquet").field("sku").type == pa.int64()
    (from_csv / "schema.json").rename(shop / "first.json")
    before = histories(_with_schema(shop, from_csv))
    from_csv.rename(shop / "first")
    after = histories(run(shop, **{"events.view.files": "views.parquet"}))
    assert before == after


def _with_schema(shop: Path, folder: Path) -> Path:
    (folder / "schema.json").write_text((shop / "first.json").read_text())
    return folder


def test_list_columns_equal_one_row_an_event(shop):
    flat = histories(run(shop))
    (shop / "out").rename(shop / "first")
    rows = {
        "customer": ["ann", "bob"],
        "sku": [["A7", "B2", "C9"], ["B2"]],
        "price": [[3.5, 9.9, None], [9.9]],
        "seen_at": [[1704096000, 1704189600, 1704794400], [1704096300]],
    }
    pq.write_table(pa.table(rows), shop / "views.parquet")
    assert histories(run(shop, **{"events.view.files": "views.parquet"})) == flat


def test_a_history_repeated_with_every_sample_is_kept_once(shop):
    rows = {
        "customer": ["ann", "bob", "ann"],
        "sku": [["A7"], ["B2"], ["A7", "B2", "C9"]],
        "price": [[3.5], [9.9], [3.5, 9.9, None]],
        "seen_at": [[1704096000], [1704096300], [1704096000, 1704189600, 1704794400]],
    }
    flat = histories(run(shop))
    (shop / "out").rename(shop / "first")
    pq.write_table(pa.table(rows), shop / "views.parquet")
    assert '"distinct": true' in fault(shop, **{"events.view.files": "views.parquet"})
    (shop / "out").rename(shop / "refused")
    got = histories(run(shop, **{"events.view.files": "views.parquet", "events.view.distinct": True}))
    assert got == flat


def test_lists_of_different_length(shop):
    rows = {"customer": ["ann"], "sku": [["A7", "B2"]], "price": [[3.5]], "seen_at": [[1, 2]]}
    pq.write_table(pa.table(rows), shop / "views.parquet")
    text = fault(shop, **{"events.view.files": "views.parquet"})
    assert "views.parquet, row 0: column 'price' has 1 entries" in text


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_chunks_do_not_show(shop, chunk, monkeypatch):
    import pyarrow.csv as pacsv

    monkeypatch.setattr(source, "CHUNK_ROWS", chunk)
    for name in ("views", "impressions"):
        pq.write_table(pacsv.read_csv(shop / f"{name}.csv"), shop / f"{name}.parquet")
    out = run(shop, **{"events.view.files": "views.parquet", "samples.files": "impressions.parquet"})
    assert Samples.open(out, Schema.load(out)).read(0, 4)["cut.view"].tolist() == [1, 0, 1, 3]
    assert [len(h) for h in histories(out).values()] == [3, 1, 0]


def test_sort(shop):
    expected = histories(run(shop))
    (shop / "out").rename(shop / "first")
    for name in ("views.csv", "impressions.csv"):
        header, *lines = (shop / name).read_text().splitlines()
        (shop / name).write_text("\n".join([header, *reversed(lines)]) + "\n")
    out = run(shop, **{"events.view.sort": True, "samples.sort": True})
    assert histories(out) == expected
    assert Samples.open(out, Schema.load(out)).read(0, 4)["item"].tolist() == [1, 2, 1, 0]


def test_several_files_gzip_and_tabs(shop):
    import gzip

    header, *lines = (shop / "views.csv").read_text().splitlines()
    expected = histories(run(shop))
    (shop / "out").rename(shop / "first")
    (shop / "part1.tsv").write_text("\n".join([header, *lines[:2]]).replace(",", "\t") + "\n")
    (shop / "part2.tsv.gz").write_bytes(
        gzip.compress(("\n".join([header, *lines[2:]]).replace(",", "\t") + "\n").encode())
    )
    assert histories(run(shop, **{"events.view.files": "part*"})) == expected


def test_ready_made_ids_are_kept(shop):
    for name in ("views.csv", "impressions.csv"):
        for sku, number in {"A7": 7, "B2": 2, "C9": 0}.items():
            edit(shop, name, sku, str(number))
    rows = {"events.view.attributes.item": {"column": "sku", "rows": 8}}
    out = run(shop, **rows, **{"samples.features.item": {"column": "sku", "rows": 8}})
    assert Samples.open(out, Schema.load(out)).read(0, 4)["item"].tolist() == [7, 2, 7, 0]
    assert not (out / "vocabulary/item.parquet").exists()
    out.rename(shop / "first")
    edit(shop, "impressions.csv", "bob,7", "bob,8")
    text = fault(shop, **rows, **{"samples.features.item": {"column": "sku", "rows": 8}})
    assert "impressions.csv, row 2: column 'sku': id 8 is outside table 'item' of 8 rows" in text


def test_samples_without_events(shop):
    out = run(shop, events=None)
    schema = Schema.load(out)
    assert schema.streams == () and Samples.open(out, schema).num_rows == 4
    batch = next(iter(Loader(out, schema, DataConfig(), max_lengths={}, split="train", batch_size=8)))
    assert batch.sequences == {} and batch.batch_size == 3


def test_millisecond_times(shop):
    edit(shop, "shop.json", '"name"', '"time_unit": "ms", "name"')
    times = {"2024-01-01 08:00:00": 1704096000_999, "2024-01-01 08:05:00": 1704096300_000}
    times |= {"2024-01-02 10:00:00": 1704189600_001, "2024-01-09 10:00:00": 1704794400_000}
    for text, number in times.items():
        edit(shop, "views.csv", text, str(number))
    assert [t for t, *_ in histories(run(shop))["ann"]] == [1704096000, 1704189600, 1704794400]


def test_an_event_of_the_same_second_is_not_visible(shop):
    edit(shop, "views.csv", "ann,A7,3.5,2024-01-01 08:00:00", "ann,A7,3.5,2024-01-01 09:00:00")
    edit(shop, "views.csv", "bob,B2,9.9,2024-01-01 08:05:00", "bob,B2,9.9,2024-01-01 09:05:00")
    out = run(shop)
    assert Samples.open(out, Schema.load(out)).read(0, 4)["cut.view"].tolist() == [0, 0, 1, 3]


def test_cuts_equal_a_plain_count(tmp_path):
    rng = np.random.default_rng(0)
    users, times = rng.integers(0, 20, 500), np.sort(rng.integers(0, 300, 500))
    seen_by, when = rng.integers(0, 25, 200), np.sort(rng.integers(-5, 320, 200))
    pq.write_table(pa.table({"user": users, "timestamp": times}), tmp_path / "e.parquet")
    pq.write_table(pa.table({"user": seen_by, "timestamp": when, "y": np.zeros(200)}), tmp_path / "s.parquet")
    spec = {
        "events": {"e": {"files": "e.parquet"}},
        "samples": {"files": "s.parquet", "labels": {"y": {}}},
        "splits": {"train": [None, None]},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    build(tmp_path / "out", spec=tmp_path / "spec.json")
    got = Samples.open(tmp_path / "out", Schema.load(tmp_path / "out")).read(0, 200)["cut.e"]
    assert got.tolist() == [int(((users == u) & (times < t)).sum()) for u, t in zip(seen_by, when, strict=True)]


def test_weights_and_boolean_labels(shop):
    import pyarrow.csv as pacsv

    table = pacsv.read_csv(shop / "impressions.csv")
    clicked = pa.array([True, False, True, False])
    table = table.set_column(5, "clicked", clicked).append_column("w", pa.array([1.0, 2.0, 0.0, 0.5]))
    pq.write_table(table, shop / "impressions.parquet")
    out = run(shop, **{"samples.files": "impressions.parquet", "samples.weight": "w"})
    got = Samples.open(out, Schema.load(out)).read(0, 4)
    assert got["weight"].tolist() == [1, 2, 0, 0.5] and got["click"].tolist() == [1, 0, 1, 0]


# ---- faults in the files -------------------------------------------------------------------------------------

BAD_FILES = {
    "label": ("impressions.csv", "red,1,1", "red,3,1", ["impressions.csv, row 2", "'clicked'", "label 3.0 is outside"]),
    "label_text": ("impressions.csv", "red,1,1", "red,yes,1", ["impressions.csv", "'clicked'", "invalid value 'yes'"]),
    "dense_missing": ("impressions.csv", "12:00:00,12", "12:00:00,", ["row 2", "'hour' is missing", '"fill"']),
    "dense_nan": ("impressions.csv", "12:00:00,12", "12:00:00,inf", ["row 2", "'hour'", "inf is not a finite"]),
    "time": ("views.csv", "2024-01-02 10:00:00", "soon", ["views.csv", "'seen_at'", "wanted a time"]),
    "time_missing": ("views.csv", "2024-01-02 10:00:00", "", ["views.csv, row 2", "'seen_at' is missing"]),
    "user_missing": ("views.csv", "bob,", ",", ["views.csv, row 1", "'customer' is missing"]),
    "event_order": ("views.csv", "2024-01-09", "2023-01-09",
                    ["views.csv, row 3", "not after the same user's event before", '"sort": true']),
    "sample_order": ("impressions.csv", "2024-01-03", "2023-01-03",
                     ["impressions.csv, row 2", "older than the one before", "sort"]),
    "column": ("views.csv", "sku", "skuu", ["views.csv has no column 'sku'", "did you mean 'skuu'"]),
    "ragged_csv": ("views.csv", "bob,B2,9.9,", "bob,B2,", ["views.csv cannot be read", "Expected 4 columns, got 3"]),
    "no_test_rows": ("impressions.csv", "2024-01-10", "2024-01-07", ["split 'test'", "has zero rows"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(shop, case):
    name, old, new, wanted = BAD_FILES[case]
    edit(shop, name, old, new)
    text = fault(shop)
    for words in wanted:
        assert words in text, text


def test_zero_rows(shop):
    (shop / "impressions.csv").write_text((shop / "impressions.csv").read_text().splitlines()[0] + "\n")
    assert "zero rows" in fault(shop)


def test_corrupt_parquet(shop):
    (shop / "views.parquet").write_bytes(b"PAR1 nothing good PAR1")
    text = fault(shop, **{"events.view.files": "views.parquet"})
    assert "views.parquet cannot be read" in text


def test_times_in_the_wrong_unit(shop):
    for old in ("2024-01-01 08:00:00", "2024-01-01 08:05:00", "2024-01-02 10:00:00", "2024-01-09 10:00:00"):
        edit(shop, "views.csv", old, "1704096000000")
    assert "set time_unit" in fault(shop)


def test_wrong_type_for_ids(shop):
    table = pa.table({"customer": ["ann"], "sku": [1.5], "price": [1.0], "seen_at": [1]})
    pq.write_table(table, shop / "views.parquet")
    assert "'sku' has type double, wanted ids: text or integers" in fault(
        shop, **{"events.view.files": "views.parquet"}
    )


# ---- faults in the description -------------------------------------------------------------------------------

BAD_SPECS = {
    "unknown_key": ({"samples.wieght": "w"}, "samples: unknown key 'wieght'; did you mean 'weight'"),
    "missing_key": ({"samples.files": None}, "samples: 'files' is missing"),
    "wrong_type": ({"events.view.sort": "yes"}, "events.view.sort is 'yes', wanted bool"),
    "no_files": ({"events.view.files": "clicks/*.csv"}, "'clicks/*.csv' matches no file"),
    "other_format": ({"events.view.files": "shop.json"}, "wanted a .parquet, .csv or .tsv file"),
    "kind": ({"samples.features.hour.kind": "float"}, "kind is 'float', wanted one of id, ids, dense, bits"),
    "split": ({"splits.test": ["8 Jan", None]}, "splits.test: '8 Jan' is no time"),
    "overlap": ({"splits.test": ["2024-01-02", None]}, "splits 'train' and 'test' overlap"),
    "no_train": ({"splits.train": None}, "splits has no 'train'"),
    "given": ({"samples.labels.convert.given": "klick"}, "given 'klick' is no other label"),
    "unit": ({"time_unit": "days"}, "time_unit is 'days', wanted one of s, ms, us, ns"),
    "mixed_rows": ({"samples.features.item.rows": 9}, "table 'item' must all have the same rows"),
    "list_attribute": ({"events.view.attributes.item.kind": "ids"}, "cannot be a list"),
    "bits": ({"events.view.attributes.price": {"kind": "bits"}}, "kind bits needs rows"),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_bad_description(shop, case):
    changes, wanted = BAD_SPECS[case]
    assert wanted in fault(shop, **changes)


def test_missing_or_broken_description(shop):
    for text, wanted in ((None, "does not exist"), ("{", "is not valid JSON"), ("[1]", "wanted an object")):
        if text is not None:
            (shop / "bad.json").write_text(text)
        with pytest.raises(UserError, match=wanted):
            build(shop / "out", spec=shop / "bad.json")


def test_a_folder_in_use_is_refused(shop):
    out = run(shop)
    with pytest.raises(UserError, match="--overwrite"):
        build(out, spec=shop / "shop.json")
    build(out, spec=shop / "shop.json", overwrite=True)
    assert Samples.open(out, Schema.load(out)).num_rows == 4


# ---- a log that is both history and samples ------------------------------------------------------------------

SHORT_VIDEO = """user_id,video_id,time_ms,is_click,is_like,long_view,play_time_ms
0,3784,1650000100000,1,0,1,9000
0,-17,1650000000000,0,0,0,0
1,3784,1650000050000,1,1,1,12000
0,3784,1650100000000,1,1,0,4000
"""


def test_the_documented_log_of_events_and_samples(tmp_path):
    """An unsorted log in milliseconds with several 0/1 signals an event."""
    (tmp_path / "log_1.csv").write_text(SHORT_VIDEO)
    (tmp_path / "spec.json").write_text(FILES["kuairand.json"])
    build(tmp_path / "out", spec=tmp_path / "spec.json")
    schema = Schema.load(tmp_path / "out")
    assert schema.stream("watch").attributes[1].rows == 3
    (train,) = Loader(tmp_path / "out", schema, DataConfig(), max_lengths={"watch": 9}, split="train", batch_size=9)
    (test,) = Loader(tmp_path / "out", schema, DataConfig(), max_lengths={"watch": 9}, split="test", batch_size=9)
    assert train.features["video"].tolist() == [2, 1, 1]
    assert train.sequences["watch.video"].lengths.tolist() == [0, 0, 1]
    assert test.sequences["watch.video"].values.tolist() == [2, 1]
    assert test.sequences["watch.signals"].values.tolist() == [0, 0b101]
    assert test.labels["like"].tolist() == [1]


def test_numbers_of_a_csv_are_not_guessed_from_its_first_lines(tmp_path, monkeypatch):
    """A column that starts with whole numbers and ids that look like numbers are read as the description says."""
    monkeypatch.setattr(source, "CSV_BYTES", 64)
    lines = [f"{i % 3},{i},{i},{i % 2}" for i in range(50)] + ["0,50,0.5,1", "0,51,07,0"]
    (tmp_path / "s.csv").write_text("user,timestamp,x,y\n" + "\n".join(lines) + "\n")
    spec = {
        "samples": {
            "files": "s.csv",
            "features": {"x": {"kind": "dense"}, "code": {"column": "x"}, "y_id": {"column": "y", "rows": 2}},
            "labels": {"y": {}},
        },
        "splits": {"train": [None, None]},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    build(tmp_path / "out", spec=tmp_path / "spec.json")
    got = Samples.open(tmp_path / "out", Schema.load(tmp_path / "out")).read(49, 52)
    assert got["x"].tolist() == [49, 0.5, 7] and got["y"].tolist() == got["y_id"].tolist() == [1, 1, 0]
    words = pq.read_table(tmp_path / "out/vocabulary/code.parquet")["value"].to_pylist()
    assert [words[i - 1] for i in got["code"]] == ["49", "0.5", "07"]


@pytest.mark.parametrize("flag", ["2", "-1"])
def test_a_flag_is_zero_or_one(shop, flag):
    edit(shop, "views.csv", "ann,A7,3.5", f"ann,A7,{flag}")
    edit(shop, "views.csv", "9.9", "1")
    changes = {"events.view.attributes.price": {"kind": "bits", "columns": ["price", "price"]}}
    assert f"views.csv, row 0: column 'price': flag {flag} must be 0 or 1" in fault(shop, **changes)


def test_a_missing_label_is_unknown(shop):
    """An empty field is null in the data set and counts nowhere; it is not 0."""
    text = (shop / "impressions.csv").read_text().splitlines()
    place = text[0].split(",").index("bought")
    fields = text[1].split(",")
    fields[place] = ""
    edit(shop, "impressions.csv", text[1], ",".join(fields))
    build(shop / "out", spec=shop / "shop.json")
    labels = pq.read_table(shop / "out/samples")["convert"]
    assert [value is None for value in labels.to_pylist()] == [True] + [False] * (len(labels) - 1)
