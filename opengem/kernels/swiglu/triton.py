"""SwiGLU on a GPU: gate and up are read once; the backward computes the sigmoid again and writes both gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import kind_of, launch

TILE = 2048  # elements of gate a program of four warps takes


@triton.jit
def _place(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(offset of gate elements, offset of output elements, mask) of this program's tile."""
    blocks = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    return row[:, None] * (2 * width) + column[None, :], row[:, None] * width + column[None, :], mask


@triton.jit(do_not_specialize=["rows"])
def _forward(x, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source, target, mask = _place(rows, width, ROWS, COLUMNS)
    gate = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(grad, x, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source, target, mask = _place(rows, width, ROWS, COLUMNS)
    gate = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + source + width, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + target, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    kind = out.dtype.element_ty
    tl.store(out + source, (g * up * sigmoid * (1 + gate * (1 - sigmoid))).to(kind), mask=mask)
    tl.store(out + source + width, (g * gate * sigmoid).to(kind), mask=mask)


def _launch(kernel, *tensors: Tensor, width: int) -> None:
    columns = min(triton.next_power_of_2(width), 1024)
    rows, tile_rows = tensors[0].shape[0], max(1, TILE // columns)
    if rows and width:
        launch(kernel, (triton.cdiv(rows, tile_rows) * triton.cdiv(width, columns), 1, 1),
               kind_of(*tensors, facts=(width,)), (*tensors, rows, width), (tile_rows, columns))


def swiglu_forward(x: Tensor) -> Tensor:
    """See `reference.swiglu_forward`."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _launch(_forward, x.contiguous(), out, width=out.shape[1])
    return out


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """See `reference.swiglu_backward`."""
    out = x.new_empty(x.shape)
    _launch(_backward, grad.contiguous(), x.contiguous(), out, width=grad.shape[1])
    return out
