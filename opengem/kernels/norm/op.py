"""`rms_norm` and `layer_norm`: over the last dimension, with the residual sum and MX quantisation fused in.

Zhang and Sennrich, "Root Mean Square Layer Normalization"; Ba, Kiros and Hinton, "Layer Normalization". A norm is bound
by memory, so what it can read once and write once it does in one pass: `x + residual` in, the sum and its norm out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.jagged_ops.check import check_same
from opengem.kernels.mx.tensor import MXTensor
from opengem.kernels.norm import reference

BLOCK = (32, 32)  # of the fused quantisation


def rms_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
             eps: float = 1e-5, quantize: str | None = None):
    """`h / sqrt(mean(h^2) + eps) * weight + bias` over the last dimension, where `h = x + residual` (or x).

    x, residual: `[..., N]`, same shape and floating dtype. weight, bias: `[N]`, any floating dtype, or None.
    quantize: None, or "e4m3" for an `MXTensor` in 32x32 blocks (x must then be a matrix) in place of y; gradients pass
    straight through the rounding.
    Returns y `[..., N]` in the dtype of x; with `residual`, the pair (y, h). An empty x gives an empty y.
    Raises ValueError naming the argument for wrong shapes, dtypes or devices.
    """
    return _norm("rms_norm", x, weight, bias, residual, eps, quantize, centered=False)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
               eps: float = 1e-5, quantize: str | None = None):
    """`(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`; arguments, result and errors as for `rms_norm`."""
    return _norm("layer_norm", x, weight, bias, residual, eps, quantize, centered=True)


def layer_norm_on(x: Tensor) -> tuple[Tensor, Tensor]:
    """(`layer_norm(x)`, x for whoever reads it next), of a matrix x: the two gradients are added by the norm's
    backward, where using x again would cost a pass over both."""
    _check("layer_norm_on", x, None, None, None, None)
    return _NormOn.apply(x)


def _norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
          quantize: str | None, *, centered: bool):
    _check(op, x, weight, bias, residual, quantize)
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    flat_residual = None if residual is None else residual.reshape(-1, shape[-1])
    if quantize is None:
        y, total, _, _ = _norm_fwd(rows, flat_residual, weight, bias, eps, centered)
        y = y.reshape(shape)
    else:
        data, scale, total, _, _, anchor = _norm_mx_fwd(rows, flat_residual, weight, bias, eps, centered)
        y = MXTensor(data, scale, BLOCK, x.dtype, anchor if anchor.requires_grad else None)
    return y if residual is None else (y, total.reshape(shape))


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
           quantize: str | None) -> None:
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must be [..., N] with N >= 1, got {list(x.shape)}")
    check_same(op, x=x, **({} if residual is None else {"residual": residual}))
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have the shape of x {list(x.shape)}, got {list(residual.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or vector.device != x.device):
            raise ValueError(
                f"{op}: {name} must be [{x.shape[-1]}] on {x.device}, got {list(vector.shape)} on {vector.device}"
            )
    if quantize is not None and (quantize != "e4m3" or x.dim() != 2):
        raise ValueError(f'{op}: quantize must be None or "e4m3" with a matrix x, got {quantize!r} and {x.dim()} dims')


def _implementation(x: Tensor, quantize: bool = False):
    kind = backend.implementation("norm", x.device, dtype=x.dtype, width=x.shape[1], quantize=quantize)
    if kind == "reference":
        return reference
    if kind == "gluon" and quantize:
        from opengem.kernels.norm import gluon_sm90

        return gluon_sm90
    from opengem.kernels.norm import triton

    return triton


def _run_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                 centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _implementation(x).norm_forward(x, residual, weight, bias, eps, centered)


def _run_quantize(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                  centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = _implementation(x, quantize=True).norm_quantize_forward
    return *run(x, residual, weight, bias, eps, centered), x.new_zeros(()).expand(x.shape)


def _run_backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, mean: Tensor,
                  rstd: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _implementation(total).norm_backward(grad, grad_total, total, weight, mean, rstd, has_bias)


def _row_outputs(x: Tensor, residual: Tensor | None, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return total, x.new_empty(rows if centered else 0, dtype=wide), x.new_empty(rows, dtype=wide)


def _fake_forward(x, residual, weight, bias, eps, centered):
    return x.new_empty(x.shape), *_row_outputs(x, residual, centered)


def _fake_quantize(x, residual, weight, bias, eps, centered):
    (rows, width), (r, c) = x.shape, BLOCK
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // r), -(-width // c)), dtype=torch.uint8)
    return data, scale, *_row_outputs(x, residual, centered), x.new_zeros(()).expand(x.shape)


def _fake_backward(grad, grad_total, total, weight, mean, rstd, has_bias):
    width = total.shape[1]
    vectors = (rstd.new_empty(width if present else 0) for present in (weight is not None, has_bias))
    return total.new_empty(total.shape), *vectors


def _save(ctx, inputs, output):
    x, residual, weight, bias, _, _ = inputs
    total, mean, rstd = output[-3:] if len(output) == 4 else output[2:5]
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.set_materialize_grads(False)  # an unused sum must not cost a pass over zeros
    ctx.has_residual = residual is not None
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx, *grads):
    grad, grad_total = (grads[0], grads[1]) if len(grads) == 4 else (grads[5], grads[2])
    total, weight, mean, rstd = ctx.saved_tensors
    grad = torch.zeros_like(total) if grad is None else grad
    has_bias = ctx.bias_dtype is not None
    grad_x, grad_weight, grad_bias = _norm_bwd(
        grad, grad_total if ctx.has_residual else None, total, weight, mean, rstd, has_bias)
    return (grad_x, grad_x if ctx.has_residual else None, None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(ctx.bias_dtype) if has_bias else None, None, None)


_norm_fwd = define("norm_fwd", _run_forward, _fake_forward, _save, _gradient)
_norm_mx_fwd = define("norm_mx_fwd", _run_quantize, _fake_quantize, _save, _gradient)
_norm_bwd = define("norm_bwd", _run_backward, _fake_backward)


class _NormOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, _, mean, rstd = _norm_fwd(x, None, None, None, 1e-5, True)
        ctx.save_for_backward(x, mean, rstd)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor | None, rest: Tensor | None) -> Tensor | None:
        x, mean, rstd = ctx.saved_tensors
        return rest if grad is None else _norm_bwd(grad, rest, x, None, mean, rstd, False)[0]
