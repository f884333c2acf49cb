"""The SwiGLU kernels against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.swiglu.op import swiglu
from tests.kernels.interpret import DEVICE, DTYPES, GPU, close_to, needs_kernels


def run(kind, x, seed):
    x = x.detach().requires_grad_()
    with backend.force(kind):
        out = swiglu(x)
        return [out, *torch.autograd.grad(out, x, seed)]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"), [(0, 8), (1, 8), (33, 1000), (5, 4096)] if GPU else [(0, 8), (33, 24), (2, 1030)])
def test_matches_the_reference(rows, width, dtype, poisoned_empty):
    x = (torch.randn(rows, 2 * width, device=DEVICE) * 3).to(dtype)
    seed = torch.randn(rows, width, device=DEVICE).to(dtype)
    got, plain = run("triton", x, seed), run("reference", x, seed)
    for triple in zip(got, run("reference", x.double(), seed.double()), plain, strict=True):
        close_to(*triple)


@pytest.mark.gpu
def test_large_gates_stay_finite():
    x = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE).bfloat16()
    assert all(bool(t.isfinite().all()) for t in run("triton", x, torch.ones(1, 2, device=DEVICE).bfloat16()))
