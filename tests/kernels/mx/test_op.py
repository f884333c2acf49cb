"""Block quantisation: bit-exact scale rule, edges, and round trips."""

import math

import pytest
import torch

from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.mx.tensor import scale_to_float


def test_scale_rounds_up_so_that_nothing_saturates():
    """A block maximum of 500 takes scale 2 and is stored as 248 or 256, not clipped to 448."""
    x = torch.zeros(32, 32)
    x[3, 5] = 500.0
    mx = quantize_mx(x)
    assert int(mx.scale) == 128
    assert float(mx.data[3, 5]) == 256.0 and float(mx.dequantize()[3, 5]) == 512.0


@pytest.mark.parametrize(
    ("amax", "exponent"), [(448.0, 0), (448.0001, 1), (256.0, 0), (1.75, -8), (1.0, -8), (1.76, -7)])
def test_scale_exponents_on_and_beside_powers_of_two(amax, exponent):
    assert int(quantize_mx(torch.full((4, 4), amax)).scale) == exponent + 127


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_scale_is_the_least_power_of_two_that_fits(format):
    largest = torch.finfo({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]).max
    for value in torch.exp2(torch.empty(200).uniform_(-30, 30)).tolist():
        mx = quantize_mx(torch.tensor([[value]]), format=format)
        scale = float(scale_to_float(mx.scale))
        value = float(torch.tensor(value))
        assert value / scale <= largest < value / (scale / 2)


@pytest.mark.parametrize("shape", [(32, 32), (33, 70), (1, 5), (64, 31)])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_round_trip_error_is_within_half_a_step(shape, magnitude):
    x = torch.randn(shape) * magnitude
    mx = quantize_mx(x)
    assert mx.scale.shape == tuple(math.ceil(n / 32) for n in shape) and mx.data.dtype == torch.float8_e4m3fn
    block_max = torch.nn.functional.max_pool2d(x.abs()[None, None].double(), 32, ceil_mode=True)[0, 0]
    bound = block_max.repeat_interleave(32, 0)[: shape[0]].repeat_interleave(32, 1)[:, : shape[1]]
    error = (mx.dequantize() - x).abs().double()
    assert bool((error <= torch.maximum(x.abs().double() * 2**-4, bound * 2**-17) * (1 + 1e-6)).all())


def test_the_transpose_has_the_same_bytes():
    x = torch.randn(70, 40)
    ours, direct = quantize_mx(x).t(), quantize_mx(x.t())
    assert torch.equal(ours.data.view(torch.uint8), direct.data.view(torch.uint8))
    assert torch.equal(ours.scale, direct.scale)


def test_zero_negative_zero_subnormal_and_non_finite_blocks():
    assert bool((quantize_mx(torch.zeros(32, 32)).dequantize() == 0).all())
    assert math.copysign(1, float(quantize_mx(torch.full((1, 1), -0.0)).dequantize())) == -1
    tiny = torch.full((32, 32), 1e-42)
    assert bool(quantize_mx(tiny).dequantize().isfinite().all())
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(32, 64)
        x[0, 0] = bad
        mx = quantize_mx(x)
        assert mx.scale.tolist() == [[255, 119]]
        assert bool(mx.dequantize()[:, :32].isnan().all()) and bool((mx.dequantize()[:, 32:] == 1).all())


def test_empty_and_bf16_and_row_blocks():
    assert quantize_mx(torch.zeros(0, 64)).dequantize().shape == (0, 64)
    mx = quantize_mx(torch.randn(3, 64).bfloat16(), block=(1, 32))
    assert mx.scale.shape == (3, 2) and mx.dequantize().dtype == torch.bfloat16


def test_scale_bytes_decode_exactly():
    value = scale_to_float(torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8))
    assert value[:5].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127] and bool(value[5].isnan())


def test_gradients_pass_straight_through():
    x = torch.randn(5, 6, requires_grad=True)
    seed = torch.randn(5, 6)
    assert torch.equal(torch.autograd.grad(quantize_mx(x).dequantize(), x, seed)[0], seed)


def test_errors():
    for arguments, message in [((torch.zeros(3),), "matrix"), ((torch.zeros(2, 2, dtype=torch.int64),), "floating")]:
        with pytest.raises(ValueError, match=message):
            quantize_mx(*arguments)
    with pytest.raises(ValueError, match="format must be"):
        quantize_mx(torch.zeros(2, 2), format="e3m4")
    with pytest.raises(ValueError, match="block must be"):
        quantize_mx(torch.zeros(2, 2), block=(0, 32))
