"""`quantize_mx`: a matrix to 8-bit floats with shared power-of-two scales."""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.mx import reference
from opengem.kernels.mx.tensor import FORMATS, MXTensor


def quantize_mx(x: Tensor, *, block: tuple[int, int] = (32, 32), format: str = "e4m3") -> MXTensor:
    """Quantise `x` `[M, K]` (any floating dtype) block by block; see `MXTensor` for the result.

    The scale of a block is its largest magnitude divided by the format's largest finite value, rounded up to a power of
    two, so nothing saturates; elements round to nearest even. A block holding inf or NaN becomes NaN as a whole. M and
    K need not be multiples of the block. An empty matrix gives empty tensors.
    Gradients pass straight through. Raises ValueError for other shapes, blocks or formats.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"quantize_mx: x must be a floating point matrix [M, K], got {x.dtype} {list(x.shape)}")
    if format not in FORMATS:
        raise ValueError(f"quantize_mx: format must be one of {sorted(FORMATS)}, got {format!r}")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"quantize_mx: block must be two sizes >= 1, got {block}")
    data, scale, anchor = _quantize(x, list(block), format)
    return MXTensor(data, scale, tuple(block), x.dtype, anchor if anchor.requires_grad else None)


def _run(x: Tensor, block: list[int], format: str) -> tuple[Tensor, Tensor, Tensor]:
    kind = backend.implementation("mx", x.device, dtype=x.dtype, block=tuple(block), format=format)
    if kind == "reference":
        data, scale = reference.quantize(x.contiguous(), (block[0], block[1]), format)
    else:
        from opengem.kernels.mx import triton

        data, scale = triton.quantize(x)
    return data, scale, x.new_zeros(()).expand(x.shape)


def _fake(x, block, format):
    scale = x.new_empty((-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=FORMATS[format]), scale, x.new_zeros(()).expand(x.shape)


def _save(ctx, inputs, outputs):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*outputs[:2])


def _gradient(ctx, grad_data, grad_scale, grad):
    return grad, None, None


_quantize = define("quantize_mx", _run, _fake, _save, _gradient)
