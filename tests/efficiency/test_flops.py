"""Useful FLOPs equal brute force over masks, PyTorch's own counter, and the sum over a run's samples."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from opengem.efficiency import flops
from opengem.kernels.block import cost as block_cost
from opengem.kernels.block.op import block_attention
from opengem.kernels.gdpa import cost as gdpa_cost
from opengem.kernels.gdpa.op import gdpa
from opengem.kernels.jfa import cost as jfa_cost
from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.model.gem import GEM
from tests import small
from tests.model.sample import embed, make_batch
from tests.model.test_gem import LENGTHS, model

HEADS, DIM = 2, 8
ATTENTION = ("opengem.jfa", "opengem.gdpa", "opengem.block", "opengem.pool")


def _case(seed: int):
    """Lengths with empty and single ones among them, one mask, q and kv of one or of different lengths."""
    r = random.Random(seed)
    size, longest = r.randint(0, 6), r.choice([1, 3, 17, 70])
    kv = [r.choice([0, 1, r.randint(0, longest), r.randint(0, longest)]) for _ in range(size)]
    same = seed % 2 == 0
    q = kv if same else [r.choice([0, 1, r.randint(0, longest)]) for _ in range(size)]
    causal = r.random() < 0.5
    window = r.choice([None, (r.randint(-1, longest + 2), r.randint(-1, longest + 2))])
    return q, kv, causal, window, r.choice([1, 4, 16, 64])


def _visible(m: int, n: int, causal: bool, window: tuple[int, int] | None) -> torch.Tensor:
    """bool `[m, n]`: the mask itself, as the attention op documents it."""
    distance = torch.arange(n)[None, :] - (torch.arange(m)[:, None] + n - m)
    left, right = window or (-1, -1)
    mask = torch.ones(m, n, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("seed", range(200))
def test_flops_equal_brute_force_over_the_mask(seed):
    """M2: every mask, window and both relations of q and kv, forward and backward, and by torch's counter."""
    q, kv, causal, window, block = _case(seed)
    pairs = sum(int(_visible(m, n, causal, window).sum()) for m, n in zip(q, kv, strict=True))
    wanted = 4 * HEADS * DIM * pairs
    assert jfa_cost.flops(q, kv, HEADS, DIM, causal=causal, window=window) == wanted
    all_pairs = 4 * HEADS * DIM * sum(m * n for m, n in zip(q, kv, strict=True))
    assert gdpa_cost.flops(q, kv, HEADS, DIM) == all_pairs
    in_blocks = sum(i // block == j // block for n in kv for i in range(n) for j in range(n))
    assert block_cost.flops(kv, HEADS, DIM, block=block) == 4 * HEADS * DIM * in_blocks

    queries = torch.randn(sum(q), HEADS, DIM, requires_grad=True)
    keys, values = (torch.randn(sum(kv), HEADS, DIM, requires_grad=True) for _ in range(2))
    longest = {"max_q": max(q, default=0), "max_kv": max(kv, default=0)}
    jagged = (queries, keys, values, _offsets(q), _offsets(kv))
    calls = {
        wanted: lambda: jagged_flash_attention(*jagged, causal=causal, window=window, **longest),
        all_pairs: lambda: gdpa(*jagged, **longest),
    }
    for forward, call in calls.items():
        with FlopCounterMode(display=False) as counter:
            out = call()
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * forward  # the convention of MFU


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_block_op_counts_itself(seed):
    _, lengths, _, _, block = _case(seed)
    q, k, v = (torch.randn(sum(lengths), HEADS, DIM, requires_grad=True) for _ in range(3))
    forward = block_cost.flops(lengths, HEADS, DIM, block=block)
    with FlopCounterMode(display=False) as counter:
        out = block_attention(q, k, v, _offsets(lengths), max_length=max(lengths, default=0), block=block)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * forward


def test_attention_is_the_part_of_the_model_that_its_attention_ops_count():
    gem, batch = model(), make_batch(LENGTHS)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gem(batch, embed(batch))
    own = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).startswith(ATTENTION))
    assert flops.attention(gem, LENGTHS) == own > 0


def _gem() -> GEM:
    return GEM(small.SCHEMA, list(small.SCHEMA.features), small.config().model, 8)


def test_flops_of_a_run_are_those_of_its_samples():
    gem = _gem()
    lengths = [random.Random(0).randint(0, 16) for _ in range(50)] + [0, 16]
    counts = [lengths.count(n) for n in range(17)]
    run = flops.RunFlops(gem.flops, ["view"])
    assert run.training({"view": counts}, len(lengths)) == 3 * sum(gem.flops({"view": lengths}).values())
    assert run.training({"view": counts}, len(lengths)) == 3 * sum(gem.flops({"view": lengths}).values())


def test_no_streams_and_no_samples():
    def forward(lengths):
        return {"heads": 10 * max((len(v) for v in lengths.values()), default=1)}

    assert flops.RunFlops(forward, []).training({}, 7) == 210
    assert flops.RunFlops(forward, ["view"]).training({"view": [0, 0]}, 0) == 0


def test_a_length_is_counted_once_however_often_it_comes():
    calls = []

    def forward(lengths):
        calls.append(lengths)
        return {"events": sum(lengths["view"])}

    run = flops.RunFlops(forward, ["view"])
    assert run.training({"view": [0, 0, 5]}, 5) == run.training({"view": [0, 0, 5]}, 5) == 30
    assert len(calls) == 2
