from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from opengem.kernels.jfa import cost
from opengem.kernels.jfa.op import jagged_flash_attention
from tests.kernels.grid import offsets
from tests.kernels.jfa import naive

WINDOWS = [None, (0, 0), (1, 0), (2, 3), (-1, 2), (3, -1), (50, 50)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_visible_pairs_count_the_mask(causal, window):
    for m in range(0, 8):
        for n in range(0, 8):
            want = int(naive.mask(m, n, causal, window).sum())
            assert cost.visible_pairs([m], [n], causal=causal, window=window) == want, (m, n)


def test_flops_and_bytes():
    assert cost.flops([2, 3], torch.tensor([5, 7]), 4, 64) == 4 * 4 * 64 * (10 + 21)
    assert cost.backward_flops(100) == 250 and cost.backward_flops(100, recompute=False) == 200
    assert cost.bytes(10, 20, 4, 2, 64) == 2 * (2 * 10 * 4 * 64 + 2 * 20 * 2 * 64)
    assert cost.bytes(10, 10, 4, 4, 64, backward=True) == 8 * 2 * 10 * 4 * 64


def test_flop_counter_sees_useful_flops_forward_and_backward():
    lengths = [3, 0, 9]
    q, k, v = (torch.randn(12, 2, 16, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        jagged_flash_attention(q, k, v, offsets(lengths), max_q=9, causal=True).sum().backward()
    forward = cost.flops(lengths, lengths, 2, 16, causal=True)
    assert counter.get_total_flops() == 3 * forward
