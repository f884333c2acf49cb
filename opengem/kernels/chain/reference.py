"""Definition of the chained norms in plain PyTorch, forward and backward, in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-5


def forward(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, total, h): see `op.chained_norms`; h is `x + inner`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + inner.to(wide)
    total = outer.to(wide) + h * (h.square().mean(1, keepdim=True) + EPS).rsqrt()
    centred = total - total.mean(1, keepdim=True)
    y = centred * (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
    return y.to(x.dtype), total.to(x.dtype), h.to(x.dtype)


def backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h and of outer."""
    dtype, wide = total.dtype, torch.promote_types(total.dtype, torch.float32)
    grad, total, h = grad.to(wide), total.to(wide), h.to(wide)
    centred = total - total.mean(1, keepdim=True)
    factor = (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
    y = centred * factor
    of_total = factor * (grad - grad.mean(1, keepdim=True) - y * (grad * y).mean(1, keepdim=True))
    of_total = of_total if grad_total is None else of_total + grad_total.to(wide)
    factor = (h.square().mean(1, keepdim=True) + EPS).rsqrt()
    u = h * factor
    of_h = factor * (of_total - u * (of_total * u).mean(1, keepdim=True))
    return of_h.to(dtype), of_total.to(dtype)
