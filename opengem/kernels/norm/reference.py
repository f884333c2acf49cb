"""Definition of the norms over the last dimension of a matrix, forward and backward, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels.mx import reference as mx


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                 centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y `[M, N]`, sum `[M, N]` or empty, mean `[M]` or empty, reciprocal deviation `[M]`) of `x` `[M, N]`.

    The sum `x + residual` is rounded to the dtype of `x` first; it is what is normalised and what the backward reads.
    """
    total = x + residual if residual is not None else x.new_empty(0)
    values = (x if residual is None else total).to(_wide(x))
    mean = values.mean(1) if centered else values.new_empty(0)
    if centered:
        values = values - mean[:, None]
    rstd = torch.rsqrt(values.square().mean(1) + eps)
    y = values * rstd[:, None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), total, mean, rstd


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `norm_forward`, with y rounded to its dtype and then quantised: (data, scale, sum, mean, rstd)."""
    y, *rest = norm_forward(x, residual, weight, bias, eps, centered)
    return *mx.quantize(y, (32, 32), "e4m3"), *rest


def norm_backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, mean: Tensor,
                  rstd: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the normalised input `[M, N]`, of weight `[N]`, of bias `[N]`); the last two fp32 or wider or empty.

    `grad_total` is the gradient that reaches `total` from elsewhere; it is added.
    """
    wide = _wide(total)
    values, g = total.to(wide), grad.to(wide)
    unit = (values - mean[:, None] if mean.numel() else values) * rstd[:, None]
    none = g.new_empty(0)
    grad_weight = (g * unit).sum(0) if weight is not None else none
    grad_bias = g.sum(0) if has_bias else none.clone()
    g = g if weight is None else g * weight
    grad_x = g - unit * (g * unit).mean(1, keepdim=True)
    if mean.numel():
        grad_x = grad_x - g.mean(1, keepdim=True)
    grad_x = grad_x * rstd[:, None]
    grad_x = grad_x if grad_total is None else grad_x + grad_total
    return grad_x.to(total.dtype), grad_weight, grad_bias
