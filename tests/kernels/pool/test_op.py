"""Pooling that averages and counts is flash attention and gdpa on their heads; seeds are normed as they are told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opengem.kernels.gdpa.op import gdpa
from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.kernels.pool.op import average_and_count, modulated_norm

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float64)


def apart(q, kv, q_offsets, kv_offsets, *, max_q, max_kv, counting):
    kinds = q.shape[1] - counting, counting
    (q0, q1), (k0, k1, v0, v1) = q.split(kinds, 1), kv.split(2 * kinds, 1)
    rows = {"max_q": max_q, "max_kv": max_kv}
    sums = gdpa(q1, k1, v1, q_offsets, kv_offsets, activation="relu", scale=q.shape[2] ** -0.5, **rows)
    counts = sums.detach().sign() * torch.log1p(sums.abs())
    return torch.cat([jagged_flash_attention(q0, k0, v0, q_offsets, kv_offsets, **rows), counts.to(q.dtype)], 1)


@pytest.mark.parametrize(("heads", "counting", "dim"), [(4, 1, 128), (3, 2, 64)] if GPU else [(4, 1, 8), (3, 2, 4)])
@pytest.mark.parametrize("lengths", [[], [0, 0], [5, 0, 70, 1], [300, 129] * 3])
def test_is_both_ops_on_their_heads(lengths, heads, counting, dim):
    torch.manual_seed(0)
    seeds, batch = 3, len(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE), torch.arange(batch + 1, device=DEVICE) * seeds
    inputs = [torch.randn(seeds * batch, heads, dim), torch.randn(sum(lengths), 2 * heads, dim)]
    inputs = [x.to(DEVICE, DTYPE).requires_grad_() for x in inputs]
    options = {"max_q": seeds, "max_kv": max(lengths, default=0), "counting": counting}
    weights = torch.randn(seeds * batch, heads, dim).to(DEVICE, DTYPE)

    def run(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves, offsets[1], offsets[0], **options)
        return [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]

    for one, other in zip(run(average_and_count, DTYPE), run(apart, torch.float64), strict=True):
        error, size = (one.double() - other).norm(), other.norm()
        assert error <= (2e-2 if GPU else 1e-9) * size + 1e-12


def test_are_what_torch_asks_of_an_op():
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (2, 8), (2, 8))]
    torch.library.opcheck(torch.ops.opengem.modulate_fwd.default, inputs)
    q, kv = torch.randn(4, 3, 8, requires_grad=True), torch.randn(9, 6, 8, requires_grad=True)
    arguments = q, kv, torch.tensor([0, 2, 4]), torch.tensor([0, 9, 9]), 2, 9, 1
    torch.library.opcheck(torch.ops.opengem.pool_fwd.default, arguments)


def test_wrong_shapes_are_told():
    q, offsets = torch.randn(2, 3, 4), torch.tensor([0, 2])
    for kv, counting in ((torch.randn(5, 5, 4), 1), (torch.randn(5, 6, 4), 3), (torch.randn(5, 6, 4), 0)):
        with pytest.raises(ValueError, match="0 < counting < H"):
            average_and_count(q, kv, offsets, offsets, max_q=2, max_kv=2, counting=counting)
    with pytest.raises(ValueError, match=r"seed must be \[S, d\]"):
        modulated_norm(torch.randn(3, 4), torch.randn(2, 4), torch.randn(1, 4))


@pytest.mark.parametrize(("seeds", "samples", "width"), [(5, 3, 8), (1, 0, 4), (17, 40, 24)])
def test_modulated_norm_is_its_formula(seeds, samples, width):
    torch.manual_seed(0)
    inputs = [torch.randn(n, width, dtype=torch.float64, requires_grad=True) for n in (seeds, samples, samples)]
    weight = torch.randn(samples, seeds, width, dtype=torch.float64)
    found = []
    for function in (modulated_norm, lambda seed, scale, shift: F.layer_norm(
            torch.addcmul(shift[:, None], seed, 1 + scale[:, None]), (width,))):
        out = function(*inputs)
        found.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
