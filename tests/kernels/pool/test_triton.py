"""The kernels around pooling's attention against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.pool import reference
from opengem.kernels.pool.op import average_and_count
from tests.kernels.interpret import DEVICE, DTYPES, close_to, needs_kernels


def compare(name, dtype, *inputs):
    from opengem.kernels.pool import triton

    exact = getattr(reference, name)(*(x.double() for x in inputs))
    cast = [x.to(dtype) for x in inputs]
    plain, got = getattr(reference, name)(*cast), getattr(triton, name)(*cast)
    as_list = list if isinstance(got, tuple) else lambda x: [x]
    for triple in zip(as_list(got), as_list(exact), as_list(plain), strict=True):
        close_to(*triple)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "counting", "dim"), [(0, 4, 1, 64), (37, 4, 1, 64), (5, 3, 2, 24)])
def test_heads_are_joined_and_split(rows, heads, counting, dim, dtype, poisoned_empty):
    averages = torch.randn(rows, heads - counting, dim, device=DEVICE).to(dtype)
    sums = (torch.randn(rows, counting, dim, device=DEVICE) * torch.logspace(-4, 4, dim, device=DEVICE)).to(dtype)
    compare("join", dtype, averages, sums)
    compare("split", dtype, torch.randn(rows, heads, dim, device=DEVICE).to(dtype), sums)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seeds", "samples", "width"), [(16, 0, 32), (5, 3, 24), (40, 35, 64)])
def test_seeds_are_modulated(seeds, samples, width, dtype, poisoned_empty):
    seed, scale_shift = torch.randn(seeds, width, device=DEVICE), torch.randn(samples, 2 * width, device=DEVICE)
    inputs = [x.to(dtype) for x in (seed, *scale_shift.chunk(2, 1))]
    compare("modulate", dtype, *inputs)
    compare("modulate_backward", dtype, torch.randn(samples, seeds, width, device=DEVICE).to(dtype), *inputs)


@needs_kernels
@pytest.mark.parametrize("lengths", [[0, 0], [5, 0, 70, 1]])
def test_pooling_runs_where_every_part_of_it_is_a_kernel(lengths, poisoned_empty):
    torch.manual_seed(0)
    seeds, heads, dim = 16, 3, 32
    offsets = [torch.tensor([0, *rows], device=DEVICE).cumsum(0) for rows in ([seeds] * len(lengths), lengths)]
    q = torch.randn(seeds * len(lengths), heads, dim, device=DEVICE).to(DTYPES[0])
    kv = torch.randn(sum(lengths), 2 * heads, dim, device=DEVICE).to(DTYPES[0])
    found = []
    for name, dtype in (("triton", DTYPES[0]), ("reference", torch.float64), ("reference", DTYPES[0])):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, kv)]
        with backend.force(name):
            out = average_and_count(*leaves, *offsets, max_q=seeds, max_kv=max(lengths), counting=1)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for triple in zip(*found, strict=True):
        close_to(*triple)
