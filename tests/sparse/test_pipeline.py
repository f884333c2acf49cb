"""The input pipeline in one process; test_sharded.py has several, test_train_processes.py what training makes of it."""

from __future__ import annotations

import pytest
import torch

from opengem.errors import UserError
from opengem.sparse.pipeline import Pipeline
from tests.sparse.test_collection import batch, collection, loss_of

BATCHES = [batch(items=(3, i, 0), hours=(i, 23, 5)) for i in range(5)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps(pairs, ours, ahead=lambda: None) -> list[float]:
    losses = []
    for _, embedded in pairs:
        ahead()
        loss = loss_of(embedded)
        loss.backward()
        ours.step(0.1)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("device", DEVICES)
def test_a_pipeline_gives_every_batch_in_order_with_the_bits_of_the_plain_loop(device):
    plain, piped = collection(device), collection(device)
    wanted = steps(((b, plain(b)) for b in (each.to(device) for each in BATCHES)), plain)
    host = [each.pin_memory() for each in BATCHES] if device == "cuda" else BATCHES
    pipe = Pipeline(host, piped)
    assert steps(((b, piped.lookup(ids)) for b, ids in pipe), piped, pipe.ahead) == wanted
    assert torch.equal(plain.storage.weight, piped.storage.weight)
    assert torch.equal(plain.storage.moment, piped.storage.moment)


@pytest.mark.gpu
def test_memory_given_back_between_streams_changes_no_bit():
    """What the side stream made is still in use on the main one when the allocator is asked for it again."""
    rows = torch.randint(10, (40, 4096), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [batch([r[:1000], [], r[1000:]], hours=(i % 24, 23, 5)).pin_memory() for i, r in enumerate(rows[:20])]
    plain, piped = collection("cuda"), collection("cuda")
    wanted = steps(((b, plain(b)) for b in (each.to("cuda") for each in batches)), plain)
    pipe = Pipeline(batches, piped)

    def churn() -> None:
        pipe.ahead()
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
            torch.full((size,), float("nan"), device="cuda")
            with torch.cuda.stream(pipe.side):
                torch.full((size,), float("nan"), device="cuda")

    assert steps(((b, piped.lookup(ids)) for b, ids in pipe), piped, churn) == wanted


def test_no_more_than_two_batches_are_read_ahead():
    read = []
    pipe = Pipeline((read.append(i) or each for i, each in enumerate(BATCHES)), collection())
    for number, _ in enumerate(pipe):
        assert len(read) == min(number + 2, len(BATCHES))
        pipe.ahead()
        assert len(read) == min(number + 3, len(BATCHES))


def test_an_empty_source_ends_at_once():
    assert list(Pipeline([], collection())) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_id_is_named_though_it_is_read_ahead(device):
    ours = collection(device)
    with pytest.raises(UserError, match="'item', table 'items' of 10 rows: id 10 "):
        for _, ids in Pipeline([batch(), batch(items=(1, 10, 2))], ours):
            ours.lookup(ids)
            ours.check()
