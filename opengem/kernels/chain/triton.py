"""The chained norms on a GPU: every row is read and written once each way; statistics are made anew in the backward."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.chain.reference import EPS
from opengem.kernels.launch import kind_of, launch

TILE = 2048  # elements of a program


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    return row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _centred(x, mask, width, EPS: tl.constexpr):
    """(rows of x with mean 0 and variance 1, what they were multiplied by)."""
    x = tl.where(mask, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    factor = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / width + EPS)
    return x * factor[:, None], factor


@triton.jit(do_not_specialize=["rows"])
def _forward(x, inner, outer, y, total, h, rows, width, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at, mask = _tile(rows, width, ROWS, BLOCK)
    kind = y.dtype.element_ty
    sums = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    sums += tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + at, sums.to(kind), mask=mask)
    factor = 1 / tl.sqrt_rn(tl.sum(sums * sums, 1) / width + EPS)
    sums = sums * factor[:, None] + tl.load(outer + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(total + at, sums.to(kind), mask=mask)
    normed, _ = _centred(sums, mask, width, EPS)
    tl.store(y + at, normed.to(kind), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(grad, grad_total, total, h, grad_h, grad_outer, rows, width, EPS: tl.constexpr, ROWS: tl.constexpr,
              BLOCK: tl.constexpr, HAS_TOTAL: tl.constexpr):
    at, mask = _tile(rows, width, ROWS, BLOCK)
    kind = grad_h.dtype.element_ty
    normed, factor = _centred(tl.load(total + at, mask=mask, other=0.0).to(tl.float32), mask, width, EPS)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    g = (g - (tl.sum(g, 1) / width)[:, None] - normed * (tl.sum(g * normed, 1) / width)[:, None]) * factor[:, None]
    if HAS_TOTAL:
        g += tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.where(mask, g, 0.0)
    tl.store(grad_outer + at, g.to(kind), mask=mask)
    u = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt_rn(tl.sum(u * u, 1) / width + EPS)
    u = u * factor[:, None]
    tl.store(grad_h + at, ((g - u * (tl.sum(g * u, 1) / width)[:, None]) * factor[:, None]).to(kind), mask=mask)


def _launch(kernel, tensors: list[Tensor], extra: tuple = ()) -> None:
    rows, width = tensors[-1].shape
    block = triton.next_power_of_2(width)
    many = max(1, TILE // block)
    if rows:
        launch(kernel, (triton.cdiv(rows, many), 1, 1), kind_of(*tensors, facts=(width,)), (*tensors, rows, width),
               (EPS, many, block, *extra))


def forward(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.forward`."""
    inputs = [part.contiguous() for part in (x, inner, outer)]
    outs = [x.new_empty(x.shape) for _ in range(3)]
    _launch(_forward, [*inputs, *outs])
    return tuple(outs)


def backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.backward`."""
    grads = [part.contiguous() for part in (grad, grad if grad_total is None else grad_total)]
    outs = [h.new_empty(h.shape) for _ in range(2)]
    _launch(_backward, [*grads, total, h, *outs], (grad_total is not None,))
    return tuple(outs)
