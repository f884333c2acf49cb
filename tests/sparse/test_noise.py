"""Counter-based numbers: the same everywhere, uniform, and rounding that is right on average."""

from __future__ import annotations

import pytest
import torch

from opengem.sparse import noise


def test_a_shard_draws_what_the_whole_table_draws():
    whole, part = torch.empty(100, 8), torch.empty(30, 8)
    noise.fill_normal(whole, 7, 0, 1.0)
    noise.fill_normal(part, 7, 50, 1.0)
    assert torch.equal(whole[50:80], part)


def test_normal_moments():
    x = torch.empty(50_000, 4)
    noise.fill_normal(x, noise.key("table"), 0, 2.0)
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 2.0) < 0.02
    assert abs(float((x[:, 0] * x[:, 1]).mean())) < 0.08
    assert float(x.abs().max()) < 14


def test_bits_are_uniform_and_differ_between_keys_and_far_elements():
    element = torch.arange(100_000)
    a, b = noise.bits(1, element), noise.bits(2, element)
    assert int(a.min()) >= 0 and int(a.max()) < 2**32
    for bit in range(32):
        assert abs(float((a >> bit & 1).double().mean()) - 0.5) < 0.01
        assert abs(float(((a ^ b) >> bit & 1).double().mean()) - 0.5) < 0.01
    assert not torch.equal(a, noise.bits(1, element + 2**33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", [1.0, -3.0, 1e-6, 1000.0])
def test_stochastic_rounding_is_unbiased(dtype, base):
    """10,000 roundings of base + a third of a step: only the two neighbours occur, and the mean is right."""
    low = torch.tensor(base).to(dtype)
    step = torch.nextafter(low, torch.tensor(float("inf") * base, dtype=dtype)).float() - low.float()
    x = (low.float() + step / 3).expand(10_000).contiguous()
    rounded = noise.stochastic_round(x, dtype, noise.bits(3, torch.arange(10_000))).float()
    up = (rounded - low.float()) / step
    assert set(up.tolist()) == {0.0, 1.0}
    assert abs(float(up.mean()) - 1 / 3) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_and_extreme_values_round_to_themselves(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, float("nan"), 2.0**-24])
    out = noise.stochastic_round(x, dtype, noise.bits(1, torch.arange(6)))
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    largest = torch.finfo(dtype).max
    assert float(noise.stochastic_round(torch.tensor([65519.0]), dtype, torch.tensor([0xFFFF]))) <= largest
