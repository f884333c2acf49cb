"""Definition of SwiGLU, forward and backward, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, 1)
    return gate, up


def swiglu_forward(x: Tensor) -> Tensor:
    """`[M, F]` from `x` `[M, 2 F]`."""
    gate, up = _halves(x)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """`[M, 2 F]`: gradients of gate and up side by side."""
    gate, up = _halves(x)
    sigmoid = torch.sigmoid(gate)
    grad = grad.to(gate.dtype)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], 1).to(x.dtype)
