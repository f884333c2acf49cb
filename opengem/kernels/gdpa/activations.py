"""The element-wise functions that take the place of softmax, each with its derivative.

`ACTIVATIONS[name].value(x)` and `.derivative(x)` work on tensors of any float dtype. A kernel that approximates a
function differentiates the same approximation, so that a gradient is always the gradient of what the forward computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


# tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415): x/2 (1 + tanh(TANH_A (x + TANH_B x^3)))
TANH_A = math.sqrt(2 / math.pi)
TANH_B = 0.044715

# gelu_poly: x (1/2 + P(x)) with P odd, |x| clamped to POLY_CLAMP. P is a minimax fit (iteratively re-weighted least
# squares of Phi(x) - 1/2 on [0, POLY_CLAMP], weight |x|, so that the error of GELU itself is level), subject to
# P(POLY_CLAMP) = 1/2 and P'(POLY_CLAMP) = 0: the function is exactly x or 0 outside and its slope has no step.
# Largest error against the erf form: value 6.2e-4, derivative 5.2e-3.
POLY_CLAMP = 3.75
POLY = (0.395997164, -0.0620299699, 0.00764335918, -0.000585210149, 2.46214011e-05, -4.31525518e-07)

# gelu_taylor6: Maclaurin series of GELU to the sixth degree, x/2 + x^2 (T2 + x^2 (T4 + x^2 T6)). Good to 6e-3 while
# |x| <= TAYLOR_LIMIT and wrong by 0.2 at 2, by 28 at 4; the op bounds its argument by normalising q and k.
TAYLOR = (1 / math.sqrt(2 * math.pi), -1 / (6 * math.sqrt(2 * math.pi)), 1 / (40 * math.sqrt(2 * math.pi)))
TAYLOR_LIMIT = 1.25

LEAKY_SLOPE = 0.01


def _gelu(x: Tensor) -> Tensor:
    return x * (0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)))


def _gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)) + x * density


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(TANH_A * x * (1 + TANH_B * x * x)))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(TANH_A * x * (1 + TANH_B * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * TANH_A * (1 + 3 * TANH_B * x * x)


def _horner(coefficients: tuple[float, ...], u: Tensor) -> Tensor:
    total = torch.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * u + c
    return total


def _gelu_poly(x: Tensor) -> Tensor:
    c = x.clamp(-POLY_CLAMP, POLY_CLAMP)
    return x * (0.5 + c * _horner(POLY, c * c))


def _gelu_poly_derivative(x: Tensor) -> Tensor:
    """1/2 + P(c) + c P'(c): right outside the clamp too, where P' is 0."""
    c = x.clamp(-POLY_CLAMP, POLY_CLAMP)
    return 0.5 + c * _horner(tuple((2 * i + 2) * a for i, a in enumerate(POLY)), c * c)


def _gelu_taylor6(x: Tensor) -> Tensor:
    return x * (0.5 + x * _horner(TAYLOR, x * x))


def _gelu_taylor6_derivative(x: Tensor) -> Tensor:
    return 0.5 + x * _horner(tuple((2 * i + 2) * a for i, a in enumerate(TAYLOR)), x * x)


def _silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _hardswish_derivative(x: Tensor) -> Tensor:
    inner = torch.where(x < 3, (2 * x + 3) / 6, torch.ones_like(x))
    return torch.where(x > -3, inner, torch.zeros_like(x))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(_gelu, _gelu_derivative),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_derivative),
    "gelu_poly": Activation(_gelu_poly, _gelu_poly_derivative),
    "gelu_taylor6": Activation(_gelu_taylor6, _gelu_taylor6_derivative),
    "silu": Activation(lambda x: x * torch.sigmoid(x), _silu_derivative),
    "relu": Activation(torch.relu, _step),
    "relu2": Activation(lambda x: torch.relu(x) ** 2, lambda x: 2 * torch.relu(x)),
    "leaky_relu": Activation(
        lambda x: torch.where(x > 0, x, LEAKY_SLOPE * x), lambda x: LEAKY_SLOPE + (1 - LEAKY_SLOPE) * _step(x)
    ),
    "hardswish": Activation(lambda x: x * (x / 6 + 0.5).clamp(0, 1), _hardswish_derivative),
    "identity": Activation(lambda x: x, torch.ones_like),
}
