"""All parameters in the compute dtype, by one cast forward and one cast of all gradients backward.

Autocast casts each parameter where it is used: two launches a parameter and step, most of them for a few bytes.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> parameter in `dtype`, for `torch.func.functional_call`; gradients reach the parameters themselves."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, _Cast.apply(dtype, *parameters), strict=True))


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = parameters[0].dtype
        return tuple(_cast(parameters, dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast([grad.contiguous() for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(wide) for grad in grads)


def _cast(tensors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(out, tensors)
    return out
