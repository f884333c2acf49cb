"""Rotary embedding on a GPU: one read, one write; a program takes some rows with all their heads, so that cos and sin
are loaded once for all heads, and finds its rows' positions by binary search in the offsets."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.jagged_ops.triton import samples_of, steps_for
from opengem.kernels.launch import kind_of, launch

TILE = 2048  # pairs a program of four warps rotates: four 16-byte loads a thread


@triton.jit(do_not_specialize=["rows", "batch", "steps", "positions"])
def _rope(x, offsets, cos, sin, out, rows, batch, steps, positions, heads, x_row, x_head, INVERSE: tl.constexpr,
          INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sample = samples_of(offsets, offsets, batch, steps, row, False)
    live = (row < rows) & (row < tl.load(offsets + batch))
    position = row - tl.load(offsets + sample)
    known = live & (position < positions)
    angle = position[:, None] * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + angle, mask=known[:, None], other=float("nan"))[:, None, :]
    s = tl.load(sin + angle, mask=known[:, None], other=0.0)[:, None, :]
    if INVERSE:
        s = -s
    head = tl.arange(0, HEADS)[None, :, None]
    here = row[:, None, None]
    mask = live[:, None, None] & (head < heads)
    written = (row < rows)[:, None, None] & (head < heads)
    source = x + here * x_row + head.to(tl.int64) * x_head
    target = out + (here * heads + head) * (2 * HALF)
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, None, :]
        whole = tl.load(source + column, mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(whole, [ROWS, HEADS, HALF, 2]))
    else:
        column = tl.arange(0, HALF)[None, None, :]
        first = tl.load(source + column, mask=mask, other=0.0)
        second = tl.load(source + HALF + column, mask=mask, other=0.0)
    kind = out.dtype.element_ty
    first, second = first.to(tl.float32), second.to(tl.float32)
    turned = tl.where(mask, first * c - second * s, 0.0).to(kind)
    quarter = tl.where(mask, second * c + first * s, 0.0).to(kind)
    if INTERLEAVED:
        whole = tl.reshape(tl.join(turned, quarter), [ROWS, HEADS, 2 * HALF])
        tl.store(target + column, whole, mask=written)
    else:
        tl.store(target + column, turned, mask=written)
        tl.store(target + HALF + column, quarter, mask=written)


def rope(x: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """See `reference.rope`."""
    (rows, heads, dim), batch = x.shape, offsets.shape[0] - 1
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or batch == 0:
        return out.zero_()
    x = x if x.stride(2) == 1 else x.contiguous()
    padded_heads = triton.next_power_of_2(heads)
    tile_rows = max(1, TILE // (padded_heads * dim // 2))
    cos, sin = cos.contiguous(), sin.contiguous()
    launch(_rope, (triton.cdiv(rows, tile_rows), 1, 1),
           kind_of(x, offsets, cos, sin, facts=(heads, *x.stride()[:2])),
           (x, offsets, cos, sin, out, rows, batch, steps_for(batch), cos.shape[0], heads, *x.stride()[:2]),
           (inverse, interleaved, tile_rows, padded_heads, dim // 2))
    return out
