"""The quantisation kernel against the reference: on a GPU, and in Triton's interpreter (whose 8-bit casts misround)."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.mx.op import quantize_mx
from tests.kernels.interpret import DEVICE, GPU, needs_kernels


def both(x):
    with backend.force("triton"):
        ours = quantize_mx(x)
    with backend.force("reference"):
        return ours, quantize_mx(x)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32] if GPU else [torch.float32])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (33, 70), (64, 544)])
@pytest.mark.parametrize("magnitude", [1e-36, 1.0, 1e30])
def test_same_bytes_as_the_reference(shape, magnitude, dtype, poisoned_empty):
    ours, exact = both((torch.randn(shape, device=DEVICE) * magnitude).to(dtype))
    assert torch.equal(ours.scale, exact.scale)
    differ = (ours.data.view(torch.uint8) != exact.data.view(torch.uint8)).double()
    assert differ.numel() == 0 or float(differ.mean()) <= (0 if GPU else 0.1)


@needs_kernels
def test_zeros_and_non_finite_blocks():
    x = torch.ones(32, 160, device=DEVICE)
    x[:, 32:64] = 0
    for column, bad in ((70, float("nan")), (100, float("inf"))):
        x[3, column] = bad
    ours, exact = both(x)
    assert torch.equal(ours.scale, exact.scale) and ours.scale.tolist() == [[119, 0, 255, 255, 119]]


@pytest.mark.gpu
def test_bf16_values_all_round_as_the_reference_does():
    """Every bf16 bit pattern, 32 rows of 2,048."""
    x = torch.arange(1 << 16, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(32, 2048)
    ours, exact = both(torch.where(x.isfinite(), x, 0))
    assert torch.equal(ours.scale, exact.scale)
    assert torch.equal(ours.data.view(torch.uint8), exact.data.view(torch.uint8))
