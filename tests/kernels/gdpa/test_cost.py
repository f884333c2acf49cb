"""The FLOP and byte formulas against a count of the cells of a mask."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from opengem.kernels.gdpa import cost, gdpa
from tests.kernels import grid


def _mask_cells(q_lengths, kv_lengths) -> int:
    q_sample = torch.arange(len(q_lengths)).repeat_interleave(torch.tensor(q_lengths, dtype=torch.long))
    kv_sample = torch.arange(len(kv_lengths)).repeat_interleave(torch.tensor(kv_lengths, dtype=torch.long))
    return int((q_sample[:, None] == kv_sample[None, :]).sum())


@pytest.mark.parametrize("name", grid.LENGTHS)
def test_flops_count_mask_cells(name):
    q_lengths, kv_lengths = grid.case(name)
    expected = 4 * 3 * 64 * _mask_cells(q_lengths, kv_lengths)
    assert cost.flops(q_lengths, kv_lengths, heads=3, head_dim=64) == expected
    assert cost.flops(torch.tensor(q_lengths), torch.tensor(kv_lengths), 3, 64) == expected


def test_bytes_count_each_tensor_once():
    q, kv = [3, 5], [7, 1]
    row = 2 * 4 * 2
    assert cost.bytes(q, kv, heads=2, head_dim=4) == row * (8 + 8 + 8 + 8)
    assert cost.bytes(q, kv, 2, 4, backward=True) == row * (3 * 8 + 4 * 8)
    assert cost.bytes([4, 4], kv, 2, 4, shared_q=True) == row * (4 + 8 + 8 + 8)
    assert cost.bytes([4, 4], kv, 2, 4, shared_q=True, backward=True) == row * (4 + 4 + 8 + 4 * 8)


def test_flop_counter_sees_useful_flops():
    q = torch.randn(5, 2, 8, requires_grad=True)
    k = torch.randn(4, 2, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = gdpa(q, k, k, torch.tensor([0, 2, 5]), torch.tensor([0, 4, 4]), max_q=3, max_kv=4)
        forward = counter.get_total_flops()
        out.sum().backward()
    useful = cost.flops([2, 3], [4, 0], 2, 8)
    assert forward == useful and counter.get_total_flops() == 3 * useful
