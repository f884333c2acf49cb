"""The store: what is written comes back, and every fault of a data set is one clear line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opengem.data import store
from opengem.data.columns import Lists, sample_columns, to_arrow
from opengem.data.schema import Schema
from opengem.data.store import Events, Samples, Writer
from opengem.errors import UserError
from tests.data import small


@pytest.fixture
def folder(tmp_path):
    small.write(tmp_path / "set")
    return tmp_path / "set"


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    return text


def change(file, column: str, function) -> None:
    """Rewrite one column of a Parquet file with `function(list of Python values)`."""
    table = pq.read_table(file)
    at = table.schema.get_field_index(column)
    values = function(table[column].to_pylist())
    kind = table.schema.field(column).type
    pq.write_table(table.set_column(at, column, pa.array(values, kind)), file)


def setting(row: int, value):
    def function(values):
        values[row] = value
        return values

    return function


# ---- round trip ----------------------------------------------------------------------------------------------


def test_what_is_written_comes_back(tmp_path):
    streams, columns = small.write(tmp_path / "set")
    schema = Schema.load(tmp_path / "set")
    assert schema == small.SCHEMA
    events = Events.open(tmp_path / "set", schema)
    assert events.num_users == 7
    for name, (lengths, flat) in streams.items():
        assert np.diff(events.offsets[name]).tolist() == lengths.tolist()
        for attribute, values in flat.items():
            assert events.columns[f"{name}.{attribute}"].tolist() == values.tolist()
    samples = Samples.open(tmp_path / "set", schema, events=events)
    assert samples.num_rows == 40
    got = samples.read(0, 40)
    for name, values in columns.items():
        if isinstance(values, Lists):
            assert got[name].offsets.tolist() == values.offsets.tolist()
            assert got[name].values.tolist() == values.values.tolist()
        else:
            assert np.allclose(got[name], values), name


def test_many_calls_and_row_groups_equal_one_call(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROW_GROUP", 7)
    streams, columns = small.write(tmp_path / "one")
    with Writer(tmp_path / "many", small.SCHEMA) as writer:
        writer.write_events(streams, list(range(7)))
        for first in range(0, 40, 3):
            rows = np.arange(first, min(first + 3, 40))
            writer.write_samples({n: v.take(rows) for n, v in columns.items()})
    one, many = (Samples.open(tmp_path / n, small.SCHEMA, cached_rows=0) for n in ("one", "many"))
    assert pq.ParquetFile(tmp_path / "many/samples/part-00000.parquet").num_row_groups > 3
    rows = np.random.default_rng(0).permutation(40)
    for left, right in ((one.read(5, 33), many.read(5, 33)), (one.take(rows), many.take(rows))):
        for name in left:
            pairs = (
                zip(left[name], right[name], strict=True)
                if isinstance(left[name], Lists)
                else [(left[name], right[name])]
            )
            assert all(np.array_equal(a, b) for a, b in pairs), name


def test_several_files_are_read_in_name_order(folder):
    table = pq.read_table(folder / "samples/part-00000.parquet")
    pq.write_table(table.slice(0, 15), folder / "samples/part-00000.parquet")
    pq.write_table(table.slice(15), folder / "samples/part-00001.parquet")
    samples = Samples.open(folder, small.SCHEMA)
    assert samples.num_rows == 40
    assert samples.read(0, 40)["timestamp"].tolist() == table["timestamp"].to_pylist()


def test_samples_can_read_some_columns_only(folder):
    samples = Samples.open(folder, small.SCHEMA, columns=["hour", "click"])
    assert sorted(samples.read(0, 3)) == ["click", "hour", "timestamp"]
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA, columns=["houre"])
    assert "did you mean 'hour'" in one_line(error)


def test_no_rows_asked_for(folder):
    got = Samples.open(folder, small.SCHEMA).read(3, 3)
    assert len(got["user"]) == 0 and len(got["tags"]) == 0


def test_a_set_without_histories(tmp_path):
    schema = dataclasses.replace(small.SCHEMA, streams=())
    columns = {n: v for n, v in small.samples(small.events()).items() if not n.startswith("cut.")}
    with Writer(tmp_path / "set", schema) as writer:
        writer.write_events({}, np.arange(7))
        writer.write_samples(columns)
    events = Events.open(tmp_path / "set", schema)
    assert events.num_users == 7
    assert len(Samples.open(tmp_path / "set", schema, events=events).read(0, 40)["user"]) == 40


def test_weight_defaults_to_one(tmp_path):
    streams = small.events()
    columns = small.samples(streams)
    del columns["weight"]
    with Writer(tmp_path / "set", small.SCHEMA) as writer:
        writer.write_events(streams, np.arange(7))
        writer.write_samples(columns)
    assert (Samples.open(tmp_path / "set", small.SCHEMA).read(0, 40)["weight"] == 1).all()


def test_split_rows_are_found_by_timestamp(folder):
    samples = Samples.open(folder, small.SCHEMA)
    times = samples.read(0, 40)["timestamp"]
    assert samples.split("train") == (0, int((times < 1_000).sum()))
    assert samples.split("test") == (int((times < 1_000).sum()), int((times < 2_000).sum()))


# ---- an unfinished or foreign folder -------------------------------------------------------------------------


def test_a_killed_import_is_not_taken_for_a_data_set(tmp_path):
    with pytest.raises(RuntimeError), Writer(tmp_path / "set", small.SCHEMA) as writer:
        writer.write_events(small.events(), np.arange(7))
        raise RuntimeError("killed")
    with pytest.raises(UserError) as error:
        Schema.load(tmp_path / "set")
    assert "no schema.json" in one_line(error)
    small.write(tmp_path / "set")
    assert Samples.open(tmp_path / "set", Schema.load(tmp_path / "set")).num_rows == 40


def test_writer_replaces_a_data_set_only_when_told(folder):
    (folder / "notes.txt").write_text("keep me")
    with pytest.raises(UserError) as error:
        Writer(folder, small.SCHEMA)
    assert "--overwrite" in one_line(error)
    assert (folder / "schema.json").exists()
    Writer(folder, small.SCHEMA, overwrite=True)
    assert not (folder / "schema.json").exists() and (folder / "notes.txt").exists()


def test_writer_never_removes_files_of_others(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events/mine.parquet").write_text("raw logs")
    with pytest.raises(UserError) as error:
        Writer(tmp_path, small.SCHEMA, overwrite=True)
    assert "holds no data set" in one_line(error)
    assert (tmp_path / "events/mine.parquet").exists()


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UserError) as error:
        small.write(tmp_path / "set")
    assert "No space left on device" in one_line(error) and not (tmp_path / "set/schema.json").exists()


def test_missing_folder(tmp_path):
    for read in (Schema.load, lambda f: Samples.open(f, small.SCHEMA), lambda f: Events.open(f, small.SCHEMA)):
        with pytest.raises(UserError) as error:
            read(tmp_path / "nowhere")
        assert "does not exist" in one_line(error)


@pytest.mark.parametrize("part", ["events", "samples"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "text"])
def test_corrupt_parquet(folder, part, damage):
    file = folder / part / "part-00000.parquet"
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[40:200] = bytes(b ^ 0xFF for b in data[40:200])
    else:
        data = b"user,item\n1,2\n"
    file.write_bytes(bytes(data))
    with pytest.raises(UserError) as error:
        Events.open(folder, small.SCHEMA)
        Samples.open(folder, small.SCHEMA).read(0, 40)
    assert "part-00000.parquet" in one_line(error) and "cannot be read (" in one_line(error)


# ---- bad values ----------------------------------------------------------------------------------------------

BAD_SAMPLES = {
    "id_is_num_rows": ("item", 3, 50, ["row 3", "'item'", "id 50", "table 'item' of 50 rows", "map unknown ids to 0"]),
    "id_negative": ("item", 0, -1, ["row 0", "id -1", "0 to 49"]),
    "ids_out_of_range": ("tags", 4, [1, 20], ["row 4, entry 1", "'tags'", "id 20", "table 'tags' of 20 rows"]),
    "label_above_one": ("click", 5, 1.5, ["row 5", "'click'", "label 1.5 is outside [0, 1]"]),
    "label_negative": ("click", 5, -1.0, ["label -1.0 is outside [0, 1]"]),
    "label_nan": ("convert", 5, float("nan"), ["'convert'", "label nan"]),
    "feature_nan": ("hour", 6, float("nan"), ["row 6", "'hour'", "nan is not a finite float32"]),
    "feature_inf": ("hour", 6, float("inf"), ["inf is not a finite float32"]),
    "null": ("hour", 7, None, ["row 7", "'hour'", "null"]),
    "null_time": ("timestamp", 7, None, ["row 7", "'timestamp' is null"]),
    "null_in_list": ("tags", 7, [1, None], ["'tags'", "null inside a list"]),
    "weight_negative": ("weight", 2, -0.5, ["row 2", "weight -0.5"]),
    "unsorted": ("timestamp", 9, 0, ["row 9", "timestamp 0 is before the one above it", "sort"]),
    "user_unknown": ("user", 1, 7, ["row 1", "user 7", "events has 7 users"]),
    "cut_beyond_history": ("cut.view", 8, 99, ["row 8", "cut.view is 99", "events"]),
    "cut_negative": ("cut.view", 8, -1, ["row 8", "cut.view", "-1 must be >= 0"]),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_sample_value(folder, case):
    column, row, value, wanted = BAD_SAMPLES[case]
    change(folder / "samples/part-00000.parquet", column, setting(row, value))
    events = Events.open(folder, small.SCHEMA)
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA, events=events).read(0, 40)
    for words in ["samples/part-00000.parquet", *wanted]:
        assert words in one_line(error)


def test_an_unknown_label_is_null_in_the_file_and_nan_in_memory(folder):
    change(folder / "samples/part-00000.parquet", "convert", setting(5, None))
    convert = Samples.open(folder, small.SCHEMA).read(0, 40)["convert"]
    assert np.isnan(convert[5]) and np.isfinite(np.delete(convert, 5)).all() and convert.dtype == np.float32
    column = next(c for c in sample_columns(small.SCHEMA) if c.name == "convert")
    assert to_arrow(convert, column, "here").is_null().to_pylist() == [row == 5 for row in range(40)]


BAD_EVENTS = {
    "id": ("view.item", [50], ["row 3, entry 0", "'view.item'", "id 50", "table 'item' of 50 rows"]),
    "nan": ("view.price", [float("nan")], ["row 3, entry 0", "'view.price'", "nan"]),
    "bits": ("view.action", [8], ["'view.action'", "8 is no mask of 3 bits"]),
    "null_list": ("view.item", None, ["row 3", "'view.item' is null"]),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_bad_event_value(folder, case):
    column, value, wanted = BAD_EVENTS[case]
    change(folder / "events/part-00000.parquet", column, setting(3, value))
    with pytest.raises(UserError) as error:
        Events.open(folder, small.SCHEMA)
    for words in ["events/part-00000.parquet", *wanted]:
        assert words in one_line(error)


def test_unsorted_events(folder):
    change(folder / "events/part-00000.parquet", "view.timestamp", lambda rows: [list(reversed(r)) for r in rows])
    with pytest.raises(UserError) as error:
        Events.open(folder, small.SCHEMA)
    assert "user row 1: stream 'view', event" in one_line(error) and "sort by time, oldest first" in one_line(error)


def test_order_is_checked_inside_histories_only():
    store._check_order(np.array([5, 6, 1, 2, 0]), np.array([0, 0, 2, 4, 4, 5, 5]), str)


def test_attributes_of_different_length(folder):
    change(folder / "events/part-00000.parquet", "view.item", setting(2, []))
    with pytest.raises(UserError) as error:
        Events.open(folder, small.SCHEMA)
    assert "user row 2: 'view.item' and 'view.timestamp' differ in length" in one_line(error)


def test_an_event_of_the_future_is_refused(folder):
    """A cut that shows events after the sample's own second leaks the future into the history."""
    events = Events.open(folder, small.SCHEMA)
    rows = Samples.open(folder, small.SCHEMA).read(0, 40)
    row = int(np.flatnonzero(rows["cut.view"] > 0)[-1])
    newest = events.offsets["view"][rows["user"][row]] + rows["cut.view"][row] - 1
    events.columns["view.timestamp"][newest] = rows["timestamp"][row]
    change(folder / "samples/part-00000.parquet", "cut.view", lambda cuts: [c * (i == row) for i, c in enumerate(cuts)])
    Samples.open(folder, small.SCHEMA, events=events).read(0, 40)
    events.columns["view.timestamp"][newest] += 1
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA, events=events).read(0, 40)
    assert f"row {row}: cut.view shows an event of second {rows['timestamp'][row] + 1}, after" in one_line(error)


def test_wrong_columns_and_types(folder):
    file = folder / "samples/part-00000.parquet"
    table = pq.read_table(file)
    faults = {
        "has no column 'hour', which schema.json asks for; did you mean 'hours'": table.rename_columns(
            ["hours" if n == "hour" else n for n in table.column_names]
        ),
        "unknown column 'extra'": table.append_column("extra", table["hour"]),
        "'item' has type float, wanted an integer": table.set_column(
            table.schema.get_field_index("item"), "item", table["hour"]
        ),
        "'tags' has type int32, wanted a list of integers": table.set_column(
            table.schema.get_field_index("tags"), "tags", table["item"]
        ),
        "'hour' has type string, wanted a number": table.set_column(
            table.schema.get_field_index("hour"), "hour", pa.array(["noon"] * 40)
        ),
    }
    for words, faulty in faults.items():
        pq.write_table(faulty, file)
        with pytest.raises(UserError) as error:
            Samples.open(folder, small.SCHEMA)
        assert words in one_line(error)


def test_wide_ids_are_checked_before_they_are_narrowed(folder):
    """An id of 2^32 + 1 must not wrap around to a legal 1 when it is stored in 32 bits."""
    file = folder / "samples/part-00000.parquet"
    table = pq.read_table(file)
    wide = pa.array([2**32 + 1] * 40, pa.int64())
    pq.write_table(table.set_column(table.schema.get_field_index("item"), "item", wide), file)
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA).read(0, 40)
    assert f"id {2**32 + 1}" in one_line(error)


def test_zero_rows(folder, tmp_path):
    with pytest.raises(UserError) as error, Writer(tmp_path / "none", small.SCHEMA) as writer:
        writer.write_events(small.events(), np.arange(7))
    assert "zero samples" in one_line(error)
    file = folder / "samples/part-00000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA)
    assert "zero rows" in one_line(error)


def test_zero_rows_in_a_split(folder):
    schema = dataclasses.replace(small.SCHEMA, splits={"late": (5_000, 6_000)})
    with pytest.raises(UserError) as error:
        Samples.open(folder, schema).split("late")
    assert "split 'late' [5000, 6000) has zero rows; timestamps run from 500 to" in one_line(error)
    with pytest.raises(UserError) as error:
        Samples.open(folder, schema).split("lat")
    assert "did you mean 'late'" in one_line(error)


def test_unsorted_row_groups(folder):
    file = folder / "samples/part-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table.slice(20), table.slice(0, 20)]), file, row_group_size=20)
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA)
    assert "row 20" in one_line(error) and "sort by time" in one_line(error)


# nulls have no numpy form; users and cuts are checked against the histories on reading
WRITTEN = [c for c in BAD_SAMPLES if not c.startswith(("null", "user", "cut_beyond", "ids", "label_nan"))]


@pytest.mark.parametrize("case", WRITTEN)
def test_the_writer_refuses_bad_values_too(tmp_path, case):
    column, row, value, _ = BAD_SAMPLES[case]
    streams = small.events()
    columns = small.samples(streams)
    columns[column] = np.asarray(setting(row, value)(columns[column].tolist()))
    with pytest.raises(UserError) as error, Writer(tmp_path / "set", small.SCHEMA) as writer:
        writer.write_events(streams, np.arange(7))
        writer.write_samples(columns)
    one_line(error)
    assert not (tmp_path / "set/schema.json").exists()


def test_writer_names_wrong_calls(tmp_path):
    streams = small.events()
    columns = small.samples(streams)
    writer = Writer(tmp_path / "set", small.SCHEMA)
    short = {**streams, "buy": (streams["buy"][0][:-1], streams["buy"][1])}
    calls = {
        "got streams ['view'], schema has ['buy', 'view']": lambda: writer.write_events({"view": streams["view"]}, []),
        "stream 'buy' has 6 lengths for 7 users": lambda: writer.write_events(short, np.arange(7)),
        "unknown column 'weigth'; did you mean 'weight'": lambda: writer.write_samples({**columns, "weigth": 1}),
        "no column 'click'": lambda: writer.write_samples({n: v for n, v in columns.items() if n != "click"}),
        "column 'item' holds float64, wanted integers": lambda: writer.write_samples(
            {**columns, "item": columns["item"] + 0.5}
        ),
        "column 'tags' must be Lists(offsets, values), got ndarray": lambda: writer.write_samples(
            {**columns, "tags": columns["item"]}
        ),
    }
    for words, call in calls.items():
        with pytest.raises(UserError) as error:
            call()
        assert words in one_line(error)


def test_files_without_statistics(folder):
    """Footers of other writers may lack the range of timestamps; then the column itself is read."""
    file = folder / "samples/part-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(table, file, write_statistics=False, row_group_size=7)
    first, last = Samples.open(folder, small.SCHEMA).split("train")
    assert (first, last) == (0, sum(t < 1_000 for t in table["timestamp"].to_pylist()))
    at = table.schema.get_field_index("timestamp")
    pq.write_table(table.set_column(at, "timestamp", pa.nulls(40, pa.int64())), file)
    with pytest.raises(UserError) as error:
        Samples.open(folder, small.SCHEMA)
    assert "row 0: column 'timestamp' is null" in one_line(error)
