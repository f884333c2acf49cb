"""The parts of pooling around its attention, in plain PyTorch: what the kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-5


def join(averages: Tensor, sums: Tensor) -> Tensor:
    """`[averages | sign(s) log(1 + |s|)]` along the heads."""
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    return torch.cat([averages, torch.copysign(torch.log1p(wide.abs()), wide).to(averages.dtype)], 1)


def split(grad: Tensor, sums: Tensor) -> Tensor:
    """Gradient of the sums, from that of the joined heads."""
    wide = torch.promote_types(sums.dtype, torch.float32)
    return (grad[:, -sums.shape[1] :].to(wide) / (1 + sums.to(wide).abs())).to(grad.dtype)


def _normed(seed: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(layer norm of `seed * (1 + scale) + shift`, reciprocal standard deviation), in fp32 or wider."""
    wide = torch.promote_types(seed.dtype, torch.float32)
    x = seed.to(wide) * (1 + scale.to(wide)[:, None]) + shift.to(wide)[:, None]
    x = x - x.mean(2, keepdim=True)
    factor = (x.square().mean(2, keepdim=True) + EPS).rsqrt()
    return x * factor, factor


def modulate(seed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _normed(seed, scale, shift)[0].to(seed.dtype)


def modulate_backward(grad: Tensor, seed: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of seed, scale and shift."""
    y, factor = _normed(seed, scale, shift)
    grad = grad.to(y.dtype)
    inner = factor * (grad - grad.mean(2, keepdim=True) - y * (grad * y).mean(2, keepdim=True))
    found = (inner * (1 + scale.to(y.dtype)[:, None])).sum(0), (inner * seed.to(y.dtype)).sum(1), inner.sum(1)
    return tuple(x.to(seed.dtype) for x in found)
