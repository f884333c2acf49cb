"""Activations against torch's own, over every bf16 number where an approximation is involved."""

from __future__ import annotations

import pytest
import torch

from opengem.kernels.gdpa.activations import ACTIVATIONS, POLY_CLAMP, TAYLOR_LIMIT
from tests.kernels.gdpa.naive import FUNCTIONS


def all_bf16() -> torch.Tensor:
    """Every finite bf16 number, fp64 `[65280]`."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    return numbers[numbers.isfinite()]


def error_table(value, truth, x: torch.Tensor) -> list[tuple[float, float]]:
    """(upper edge, largest |value - truth|) in bands of |x|."""
    edges = [0.0, 0.5, 1.0, 2.0, 3.0, POLY_CLAMP, 4.0, 8.0, 100.0]
    error = (value(x) - truth(x)).abs()
    bands = zip(edges[:-1], edges[1:], strict=True)
    return [(hi, float(error[(x.abs() >= lo) & (x.abs() <= hi)].max())) for lo, hi in bands]



@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_is_torchs_and_derivative_is_autograds(name):
    x = torch.cat([torch.linspace(-12, 12, 4001, dtype=torch.float64), torch.tensor([-100.0, 100.0, 0.5])])
    x = x.requires_grad_()
    truth = FUNCTIONS[name](x)
    torch.testing.assert_close(ACTIVATIONS[name].value(x), truth, rtol=1e-9, atol=1e-9)
    smooth = (x.abs() > 1e-12) & (x.abs() - 3).abs().gt(1e-12)  # kinks of relu and hardswish
    (slope,) = torch.autograd.grad(truth.sum(), x)
    torch.testing.assert_close(ACTIVATIONS[name].derivative(x)[smooth], slope[smooth], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"gelu_taylor6", "relu2"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_are_finite_and_right(name, dtype):
    """K9: tanh written with e^2x is NaN from 45 on; gelu(11) is 11 with slope 1."""
    x = torch.tensor([11.0, 45.0, 100.0, 1e4, 1e6], dtype=dtype)
    act = ACTIVATIONS[name]
    torch.testing.assert_close(act.value(x), x, rtol=2e-5, atol=0)
    torch.testing.assert_close(act.derivative(x), torch.ones_like(x), rtol=2e-4, atol=0)
    assert act.value(-x).isfinite().all() and act.derivative(-x).isfinite().all()
    if name not in ("identity", "leaky_relu"):
        assert (act.value(-x).abs() <= 2e-5 * x).all() and (act.derivative(-x).abs() < 1e-3).all()


def test_poly_error_over_every_bf16_input():
    x = all_bf16()
    exact = ACTIVATIONS["gelu"]
    near = x[x.abs() <= 100]
    assert max(e for _, e in error_table(ACTIVATIONS["gelu_poly"].value, exact.value, near)) < 6.3e-4
    assert max(e for _, e in error_table(ACTIVATIONS["gelu_poly"].derivative, exact.derivative, near)) < 5.3e-3
    far = x[x.abs() > POLY_CLAMP]
    residue = (ACTIVATIONS["gelu_poly"].value(far) - far.clamp(min=0)).abs() / far.abs()
    assert float(residue.max()) < 1e-7


def test_poly_has_no_step_at_the_clamp():
    edge = torch.tensor([POLY_CLAMP, -POLY_CLAMP], dtype=torch.float64)
    act = ACTIVATIONS["gelu_poly"]
    torch.testing.assert_close(act.derivative(edge * (1 - 1e-9)), act.derivative(edge * (1 + 1e-9)), rtol=0, atol=1e-6)
    torch.testing.assert_close(act.derivative(edge), torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)


def test_taylor_holds_inside_its_limit_only():
    inside = torch.linspace(-TAYLOR_LIMIT, TAYLOR_LIMIT, 1001, dtype=torch.float64)
    error = (ACTIVATIONS["gelu_taylor6"].value(inside) - ACTIVATIONS["gelu"].value(inside)).abs()
    assert float(error.max()) < 7e-3
    two = torch.tensor([2.0], dtype=torch.float64)
    assert float((ACTIVATIONS["gelu_taylor6"].value(two) - ACTIVATIONS["gelu"].value(two)).abs()) > 0.2


if __name__ == "__main__":  # prints the table of docs/kernels_gdpa.md
    for label in ("gelu_poly", "gelu_tanh"):
        act, exact = ACTIVATIONS[label], ACTIVATIONS["gelu"]
        inputs = all_bf16()
        slopes = error_table(act.derivative, exact.derivative, inputs)
        for (hi, value), (_, slope) in zip(error_table(act.value, exact.value, inputs), slopes, strict=True):
            print(f"| {label} | {hi:g} | {value:.1e} | {slope:.1e} |")
