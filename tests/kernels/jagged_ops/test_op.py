"""Jagged copies and products against per-sample loops in fp64."""

import pytest
import torch

from opengem.kernels.jagged_ops import cost, op
from tests.kernels.grid import LENGTHS, case, offsets

NAMES = list(LENGTHS)


def rows(count, *tail):
    return torch.randn(count, *tail, dtype=torch.float64, requires_grad=True)


def pieces(values, lengths):
    return list(values.split(lengths)) if lengths else []


def same_values_and_gradients(got, want, leaves):
    torch.testing.assert_close(got, want)
    seed = torch.randn_like(got)
    grads = torch.autograd.grad(got, leaves, seed, retain_graph=True)
    for a, b in zip(grads, torch.autograd.grad(want, leaves, seed, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b)


def padded_loop(parts, size, fill, tail):
    out = [torch.cat([p[:size], p.new_full((max(0, size - p.shape[0]), *tail), fill)]) for p in parts]
    return torch.stack(out) if out else torch.empty(0, size, *tail, dtype=torch.float64)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "empty_batch"])
def test_pad_and_unpad(name, poisoned_empty):
    lengths = case(name)[0]
    x, starts, size = rows(sum(lengths), 2, 3), offsets(lengths), max(lengths) + 2
    want = padded_loop(pieces(x, lengths), size, 7.0, (2, 3))
    same_values_and_gradients(op.jagged_to_padded(x, starts, size, fill=7.0), want, [x])
    dense = rows(len(lengths), size, 3)
    want = torch.cat([dense[b, :n] for b, n in enumerate(lengths)])
    same_values_and_gradients(op.padded_to_jagged(dense, starts, sum(lengths)), want, [dense])


def test_a_sample_longer_than_max_length():
    x, starts = rows(5, 2), offsets([3, 2])
    with pytest.raises(ValueError, match="more than max_length 2"):
        op.jagged_to_padded(x, starts, 2)
    out = op.jagged_to_padded(x, starts, 2, truncate=True)
    assert torch.equal(out[0], x[:2])
    assert torch.autograd.grad(out.sum(), x)[0][:, 0].tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_concat_and_split(name, poisoned_empty):
    lengths, others = case(name)
    left, right = rows(sum(lengths), 3), rows(sum(others), 3)
    out, joined = op.concat_jagged(left, right, offsets(lengths), offsets(others))
    order = [p for pair in zip(pieces(left, lengths), pieces(right, others), strict=True) for p in pair]
    want = torch.cat([left[:0], *order])
    same_values_and_gradients(out, want, [left, right])
    assert torch.equal(joined, offsets([a + b for a, b in zip(lengths, others, strict=True)]))
    back = op.split_jagged(out, offsets(lengths), offsets(others), sum(lengths))
    assert torch.equal(back[0], left) and torch.equal(back[1], right)
    seeds = torch.randn_like(left), torch.randn_like(right)
    for got, seed in zip(torch.autograd.grad(back, [left, right], seeds), seeds, strict=True):
        torch.testing.assert_close(got, seed)


@pytest.mark.parametrize("index", [[], [0], [3, 3, 3, 0, 4, 3]])
def test_gather_rows_adds_repeated_uses(index, poisoned_empty):
    x, index = rows(5, 2, 2), torch.tensor(index, dtype=torch.int64)
    same_values_and_gradients(op.gather_rows(x, index), x[index], [x])


@pytest.mark.parametrize("name", NAMES)
def test_broadcast_add(name, poisoned_empty):
    lengths = case(name)[0]
    x, dense = rows(sum(lengths), 3), rows(len(lengths), 3)
    want = torch.cat([x[:0], *(p + dense[b] for b, p in enumerate(pieces(x, lengths)))])
    same_values_and_gradients(op.broadcast_add(x, dense, offsets(lengths)), want, [x, dense])


@pytest.mark.parametrize("name", NAMES)
def test_jagged_dense_bmm(name, poisoned_empty, monkeypatch):
    monkeypatch.setattr(op.reference, "PADDED_ELEMENTS", 2000)
    lengths = case(name)[0]
    x, dense, bias = rows(sum(lengths), 4), rows(len(lengths), 4, 5), rows(len(lengths), 5)
    parts = [p @ dense[b] + bias[b] for b, p in enumerate(pieces(x, lengths))]
    want = torch.cat([x[:0] @ dense.sum(0), *parts])
    size = max(lengths, default=0)
    got = op.jagged_dense_bmm(x, dense, offsets(lengths), max_length=size, bias=bias)
    same_values_and_gradients(got, want, [x, dense, bias])


def test_int32_offsets_and_bf16_sums_are_exact_in_fp32():
    x = torch.ones(4000, 1, dtype=torch.bfloat16, requires_grad=True)
    dense = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = op.broadcast_add(x, dense, offsets([4000], dtype=torch.int32))
    assert float(torch.autograd.grad(out.sum(), dense)[0]) == 4000
    index = torch.zeros(4000, dtype=torch.int32)
    assert float(torch.autograd.grad(op.gather_rows(x, index).sum(), x)[0][0]) == 4000


@pytest.mark.parametrize(("call", "message"), [
    (lambda: op.jagged_to_padded(torch.zeros(3, 1), torch.tensor([0, 2]), 4), "offsets run from 0 to 2"),
    (lambda: op.jagged_to_padded(torch.zeros(3, 1), torch.tensor([0, 4, 3]), 4), "must not decrease"),
    (lambda: op.padded_to_jagged(torch.zeros(2, 3), torch.tensor([0, 3]), 3), "B = 1"),
    (lambda: op.gather_rows(torch.zeros(3, 1), torch.tensor([3])), r"in \[0, 3\)"),
    (lambda: op.gather_rows(torch.zeros(3, 1), torch.tensor([0.5])), "int32 or int64"),
    (lambda: op.broadcast_add(torch.zeros(3, 1), torch.zeros(2, 1), torch.tensor([0, 3])), "dense must be"),
    (lambda: op.concat_jagged(torch.zeros(1, 2), torch.zeros(1, 3), offsets([1]), offsets([1])), "rows"),
    (lambda: op.split_jagged(torch.zeros(1, 2), torch.tensor([0, 2]), torch.tensor([0, 0]), 2), "left_rows"),
    (lambda: op.jagged_dense_bmm(torch.zeros(1, 2), torch.zeros(1, 3, 2), offsets([1]), max_length=1), "wanted"),
])
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_opcheck_and_flops():
    x, starts = rows(5, 3), offsets([2, 0, 3])
    dense = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    ops = torch.ops.opengem
    torch.library.opcheck(ops.jagged_to_padded, (x, starts, 4, 0.0))
    torch.library.opcheck(ops.padded_to_jagged, (dense, offsets([1, 2, 2]), 5))
    torch.library.opcheck(ops.concat_jagged, (x, x, starts, starts))
    torch.library.opcheck(ops.split_jagged, (x, offsets([1, 0, 1]), offsets([1, 0, 2]), 2))
    torch.library.opcheck(ops.gather_rows, (x, torch.tensor([1, 1])))
    torch.library.opcheck(ops.broadcast_add, (x, dense[:, :, 0].detach().clone().requires_grad_(), starts))
    torch.library.opcheck(ops.jagged_dense_bmm, (x, dense, starts, 3))
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        op.jagged_dense_bmm(x, dense, starts, max_length=3).sum().backward()
    assert counter.get_total_flops() == 3 * cost.bmm_flops(5, 3, 4) == 3 * 2 * 5 * 3 * 4


def test_bytes():
    assert cost.pad_bytes(5, 2, 4, 8) == (5 + 8) * 8
    assert cost.unpad_bytes(5, 8) == 80
    assert cost.broadcast_add_bytes(5, 2, 8) == 96
    assert cost.segment_sum_bytes(5, 2, 8) == 56
