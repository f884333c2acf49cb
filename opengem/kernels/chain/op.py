"""`chained_norms`: an RMS norm of a sum, the residual sum, and the layer norm of that, in one pass over the rows.

Between context attention and the next part of a layer stand two norms and two sums. As two ops they read and write a
row eight times forward and seven times backward, as one six and six times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels import backend
from opengem.kernels.chain import reference
from opengem.kernels.custom_op import define
from opengem.kernels.jagged_ops.check import check_same


def chained_norms(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """(`layer_norm(total)`, total) with `total = outer + rms_norm(x + inner)`, all `[T, d]` of one dtype.

    Without weights, both with eps 1e-5, in fp32 or wider. T = 0 is ordinary. Raises ValueError for other shapes.
    """
    check_same("chained_norms", x=x, inner=inner, outer=outer)
    if x.dim() != 2 or x.shape[1] == 0 or inner.shape != x.shape or outer.shape != x.shape:
        raise ValueError(f"chained_norms: x, inner and outer must be [T, d] alike with d >= 1, got {list(x.shape)}, "
                         f"{list(inner.shape)} and {list(outer.shape)}")  # fmt: skip
    return _forward(x, inner, outer)[:2]


def _implementation(x: Tensor):
    if backend.implementation("chain", x.device, dtype=x.dtype, width=x.shape[1]) == "reference":
        return reference
    from opengem.kernels.chain import triton

    return triton


def _run_forward(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _implementation(x).forward(x, inner, outer)


def _run_backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return _implementation(h).backward(grad, grad_total, total, h)


def _fake_forward(x, inner, outer):
    return tuple(x.new_empty(x.shape) for _ in range(3))


def _fake_backward(grad, grad_total, total, h):
    return h.new_empty(h.shape), h.new_empty(h.shape)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*output[1:])


def _gradient(ctx, grad, grad_total, _):
    total, h = ctx.saved_tensors
    grad = torch.zeros_like(total) if grad is None else grad
    grad_h, grad_outer = _backward(grad, grad_total, total, h)
    return grad_h, grad_h, grad_outer


_forward = define("chain_fwd", _run_forward, _fake_forward, _save, _gradient)
_backward = define("chain_bwd", _run_backward, _fake_backward)
