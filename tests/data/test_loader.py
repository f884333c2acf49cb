"""The loader: batches equal a plain per-sample reading, ranks share the rows, and a resumed run misses nothing."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch

from opengem.config import DataConfig
from opengem.data.batch import Batch
from opengem.data.loader import Loader, input_features
from opengem.data.store import Events
from opengem.errors import UserError
from opengem.jagged import Jagged
from tests.data import small

LENGTHS = {"view": 5, "buy": 3}
ALL = dataclasses.replace(small.SCHEMA, splits={"train": (0, 10_000)})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, *small.write(folder, num_rows=61)


def loader(made, *, prefetch: int = 2, shuffle_rows: int = 0, split: str = "train", **options) -> Loader:
    config = DataConfig(prefetch=prefetch, shuffle_rows=shuffle_rows)
    options = {"max_lengths": LENGTHS, "batch_size": 8, "split": split, **options}
    return Loader(made[0], ALL if split == "train" else small.SCHEMA, config, **options)


def rows(batches) -> list[int]:
    return [row for batch in batches for row in batch.rows.tolist()]


def same(left: Batch, right: Batch) -> bool:
    def tensors(batch):
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            for name, item in value.items() if isinstance(value, dict) else [(field.name, value)]:
                yield from ((name, item.values), (name, item.offsets)) if isinstance(item, Jagged) else ((name, item),)

    pairs = list(zip(tensors(left), tensors(right), strict=True))
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


# ---- contents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_rows", [0, 16])
def test_every_cell_equals_a_plain_reading(made, shuffle_rows):
    _, streams, columns = made
    seen = 0
    for batch in loader(made, shuffle_rows=shuffle_rows):
        for i, row in enumerate(batch.rows.tolist()):
            seen += 1
            for stream, (lengths, flat) in streams.items():
                start = int(lengths[: columns["user"][row]].sum())
                cut = int(columns[f"cut.{stream}"][row])
                kept = slice(start + max(cut - LENGTHS[stream], 0), start + cut)
                for name, values in flat.items():
                    assert batch.sequences[f"{stream}.{name}"].to_list()[i].tolist() == values[kept].tolist()
            tags = columns["tags"]
            assert (
                batch.features["tags"].to_list()[i].tolist()
                == tags.values[tags.offsets[row] : tags.offsets[row + 1]].tolist()
            )
            assert batch.features["item"][i] == columns["item"][row]
            assert batch.features["hour"][i] == columns["hour"][row]
            assert batch.labels["convert"][i] == columns["convert"][row]
            assert batch.weights[i] == columns["weight"][row] and batch.timestamps[i] == columns["timestamp"][row]
    assert seen == 61


def test_types_and_shared_offsets(made):
    batch = next(iter(loader(made)))
    kinds = {
        "view.item": torch.int64,
        "view.price": torch.float32,
        "view.action": torch.int64,
        "view.timestamp": torch.int64,
    }
    for name, dtype in kinds.items():
        assert batch.sequences[name].values.dtype == dtype
        assert batch.sequences[name].offsets is batch.sequences["view.item"].offsets
    assert batch.features["item"].dtype == torch.int64 and batch.features["hour"].dtype == torch.float32
    assert batch.features["tags"].values.dtype == torch.int64
    assert {t.dtype for t in (*batch.labels.values(), batch.weights)} == {torch.float32}
    assert batch.timestamps.dtype == batch.rows.dtype == torch.int64
    assert batch.sequences["view.item"].max_length == int(batch.sequences["view.item"].lengths.max()) <= LENGTHS["view"]


def test_streams_and_features_can_be_left_out(made):
    batch = next(iter(loader(made, max_lengths={"buy": 2})))
    assert {n.split(".")[0] for n in batch.sequences} == {"buy"}
    assert "count" not in batch.features


def test_older_events_are_searched_for_what_a_candidate_shares(made):
    _, streams, columns = made
    names = set()
    for batch in loader(made, counted={"view": 4, "buy": 0}):
        names |= {name for name in (*batch.sequences, *batch.features) if ".counted" in name}
        for i, row in enumerate(batch.rows.tolist()):
            lengths, flat = streams["view"]
            start, cut = int(lengths[: columns["user"][row]].sum()), int(columns["cut.view"][row])
            before = max(cut - LENGTHS["view"], 0)
            older = np.arange(start + max(before - 4, 0), start + before)
            found = flat["timestamp"][older[flat["item"][older] == columns["item"][row]]]
            assert batch.features["view.counted"][i] == len(older)
            assert batch.sequences["view.counted.item.item"].to_list()[i].tolist() == found.tolist()
    assert names == {"view.counted", "view.counted.item.item"}


def test_optional_features():
    def names(*chosen):
        return [f.name for f in input_features(small.SCHEMA, DataConfig(optional_features=chosen))]

    assert names() == ["item", "tags", "hour"]
    assert names("count") == names("co*") == names("*") == names("c*", "count") == ["item", "tags", "hour", "count"]
    for wrong in ("counts", "hour", "h*"):
        with pytest.raises(UserError, match="optional_features"):
            names(wrong)


def test_unknown_stream_and_split(made):
    with pytest.raises(UserError, match="no stream 'viev'; did you mean 'view'"):
        loader(made, max_lengths={"viev": 3})
    with pytest.raises(UserError, match="no split 'valid'"):
        loader(made, split="valid")


def test_limit_rows(made):
    short = loader(made, limit_rows=10)
    assert len(short) == 2 and rows(short) == list(range(10))


def test_splits_do_not_mix(made):
    times = made[2]["timestamp"]
    assert rows(loader(made, split="test")) == np.flatnonzero((times >= 1_000) & (times < 2_000)).tolist()


# ---- order, ranks, tail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_rows", [0, 7, 1_000])
def test_order_depends_on_the_seed_alone(made, shuffle_rows):
    one = rows(loader(made, shuffle_rows=shuffle_rows))
    assert sorted(one) == list(range(61)) and (one == list(range(61))) == (shuffle_rows == 0)
    assert one == rows(loader(made, shuffle_rows=shuffle_rows, batch_size=13, prefetch=0))
    assert shuffle_rows == 0 or one != rows(loader(made, shuffle_rows=shuffle_rows, seed=1))
    window = shuffle_rows or 61
    for first in range(0, 61, window):
        assert sorted(one[first : first + window]) == list(range(first, min(first + window, 61)))


def test_epochs_are_shuffled_differently(made):
    twice = loader(made, shuffle_rows=61)
    first, second = rows(twice), rows(twice)
    assert twice.epoch == 2 and first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_ranks_share_every_batch_and_stop_together(made, world_size, prefetch):
    """Ranks that run out of data at different times hang a collective: all must yield the same number of batches."""
    ranks = [list(loader(made, rank=r, world_size=world_size, prefetch=prefetch)) for r in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(loader(made))} == {8}
    together = [rows(step) for step in zip(*ranks, strict=True)]
    assert together == [list(range(i, min(i + 8, 61))) for i in range(0, 61, 8)]


def test_five_rows_batch_two_on_two_ranks(made):
    ranks = [list(loader(made, rank=r, world_size=2, batch_size=2, limit_rows=5)) for r in range(2)]
    assert [[b.batch_size for b in batches] for batches in ranks] == [[1, 1, 0], [1, 1, 1]]


def test_a_rank_without_rows_gets_an_ordinary_empty_batch(made):
    batch = next(iter(loader(made, rank=0, world_size=4, limit_rows=1)))
    assert batch.batch_size == 0
    assert batch.sequences["view.item"].offsets.tolist() == [0] and batch.sequences["view.price"].values.shape == (0,)
    assert batch.features["tags"].offsets.tolist() == [0]
    assert batch.features["item"].dtype == torch.int64 and batch.labels["click"].shape == (0,)


# ---- resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_rows", [0, 16])
@pytest.mark.parametrize("stop", [1, 4, 8])
def test_resume_is_bit_exact(made, shuffle_rows, stop):
    whole = list(loader(made, shuffle_rows=shuffle_rows, seed=3))
    first = loader(made, shuffle_rows=shuffle_rows, seed=3)
    reading = iter(first)
    head = [next(reading) for _ in range(stop)]
    state = first.state_dict()
    reading.close()
    resumed = loader(made, shuffle_rows=shuffle_rows, seed=3)
    resumed.load_state_dict(state)
    tail = list(resumed)
    assert len(head) + len(tail) == len(whole)
    assert all(same(a, b) for a, b in zip([*head, *tail], whole, strict=True))
    assert resumed.epoch == 1


@pytest.mark.parametrize("shuffle_rows", [0, 5])
def test_resume_on_another_number_of_ranks(made, shuffle_rows):
    """Stop after one batch on four ranks, resume on two: every row exactly once."""
    four = [loader(made, rank=r, world_size=4, batch_size=4, limit_rows=8, shuffle_rows=shuffle_rows) for r in range(4)]
    seen = []
    for one in four:
        seen += next(iter(one)).rows.tolist()
    states = [one.state_dict() for one in four]
    assert all(state == states[0] for state in states)
    for rank in range(2):
        two = loader(made, rank=rank, world_size=2, batch_size=3, limit_rows=8, shuffle_rows=shuffle_rows)
        two.load_state_dict(states[0])
        seen += rows(two)
    assert sorted(seen) == list(range(8))


def test_prefetched_batches_are_not_counted(made):
    ahead = loader(made, prefetch=6)
    reading = iter(ahead)
    next(reading), next(reading)
    assert ahead.state_dict()["row"] == 16
    reading.close()
    assert rows(ahead) == list(range(16, 61))


def test_resume_with_another_order_is_refused(made):
    state = loader(made, shuffle_rows=8).state_dict()
    for other in ({"shuffle_rows": 4}, {"shuffle_rows": 8, "seed": 9}, {"shuffle_rows": 8, "limit_rows": 30}):
        with pytest.raises(UserError, match="cannot resume the data position"):
            loader(made, **other).load_state_dict(state)


def test_switching_between_training_and_evaluation(made):
    """Train 2, evaluate, train 2, evaluate, then the rest, twice: the right batches and no stall."""
    train = loader(made)
    test = loader(made, split="test", events=train.events)
    for _ in range(2):
        got = []
        for steps in (2, 2, 100):
            reading = iter(train)
            got += [batch for _, batch in zip(range(steps), reading, strict=False)]
            reading.close()
            assert len(list(test)) == len(test)
        assert rows(got) == list(range(61))


# ---- faults in the background --------------------------------------------------------------------------------


def test_a_fault_in_a_background_thread_reaches_the_consumer(made):
    broken = loader(made, prefetch=4)
    broken._samples._events = Events({"view": np.zeros(3, np.int64)}, {}, num_users=2)
    broken._samples._cache.clear()
    with pytest.raises(UserError, match="events has 2 users"):
        list(broken)


def test_no_thread_outlives_its_loop(made):
    before = threading.active_count()
    reading = iter(loader(made, prefetch=4))
    next(reading)
    reading.close()
    list(loader(made))
    assert threading.active_count() == before
