"""All parameters in the compute dtype by one cast, all gradients back by another; autocast launches two a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> float32 parameter in `dtype`, for `torch.func.functional_call`; gradients reach the parameters."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, _Cast.apply(dtype, *parameters), strict=True))


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(parameters, dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast([grad.contiguous() for grad in grads if grad is not None], torch.float32))
        return None, *(None if grad is None else next(wide) for grad in grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(out, tensors)
    return out
