"""Block attention on a GPU: one program per tile of 64 rows and head, everything of a tile on chip.

A 64x64 tile is bound by memory (32 FLOP a byte), so the kernels are plain: read q, k, v once, write once, several CTAs
an SM to hide latency. A tile holds whole softmax rows: no running maximum, no log-sum-exp in memory, and the backward's
delta is a row sum of registers. With RoPE, q and k are rotated after the load and their fp32 gradients before the
store. The two halves of a pair stay apart all the way (two products over D/2 instead of one over D), which makes both
pairings cheap; angles are loaded again for each gradient, so that they do not hold registers. Tiling as in
`reference.tiles`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)

# (direction, head dim, rope) -> launch options; one choice each, so that bits never depend on tuning
CONFIGS = {
    ("forward", 64, False): {"num_warps": 4},
    ("forward", 128, False): {"num_warps": 4},
    ("forward", 64, True): {"num_warps": 4},
    ("forward", 128, True): {"num_warps": 8, "maxnreg": 128},
    ("backward", 64, False): {"num_warps": 4},
    ("backward", 128, False): {"num_warps": 8},
    ("backward", 64, True): {"num_warps": 8, "maxnreg": 128},
    ("backward", 128, True): {"num_warps": 8, "maxnreg": 128},
}


@triton.jit
def _locate(offsets, batch, tile, rows, BLOCK: tl.constexpr):
    """(first row, end of its sample, end of what to write, position of the first row) of a tile.

    The last sample also writes zeros to rows behind the last offset.
    """
    low = tile * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        ours = tl.load(offsets + middle).to(tl.int64) // BLOCK + middle <= tile
        low = tl.where(ours, middle, low)
        high = tl.where(ours, high, middle)
    begin = tl.load(offsets + low).to(tl.int64)
    end = tl.load(offsets + low + 1).to(tl.int64)
    position = (tile - begin // BLOCK - low) * BLOCK
    limit = tl.where(low == batch - 1, rows, end)
    return begin + position, end, limit, position


@triton.jit
def _load_pair(base, row, stride, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of every pair, each `[BLOCK, HALF]`."""
    BLOCK: tl.constexpr = row.shape[0]
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)
        whole = tl.load(base + row[:, None] * stride + column[None, :], mask=live[:, None], other=0.0)
        first, second = tl.split(tl.reshape(whole, [BLOCK, HALF, 2]))
    else:
        column = tl.arange(0, HALF)
        pointer = base + row[:, None] * stride + column[None, :]
        first = tl.load(pointer, mask=live[:, None], other=0.0)
        second = tl.load(pointer + HALF, mask=live[:, None], other=0.0)
    return first, second


@triton.jit
def _store_pair(base, row, stride, mask, first, second, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    BLOCK: tl.constexpr = row.shape[0]
    kind = base.dtype.element_ty
    if INTERLEAVED:
        whole = tl.reshape(tl.join(first.to(kind), second.to(kind)), [BLOCK, 2 * HALF])
        tl.store(base + row[:, None] * stride + tl.arange(0, 2 * HALF)[None, :], whole, mask=mask[:, None])
    else:
        pointer = base + row[:, None] * stride + tl.arange(0, HALF)[None, :]
        tl.store(pointer, first.to(kind), mask=mask[:, None])
        tl.store(pointer + HALF, second.to(kind), mask=mask[:, None])


@triton.jit
def _rotate(first, second, cos, sin):
    first32, second32 = first.to(tl.float32), second.to(tl.float32)
    turned, quarter = first32 * cos - second32 * sin, second32 * cos + first32 * sin
    return turned.to(first.dtype), quarter.to(second.dtype)


@triton.jit
def _angles(cos, sin, position, positions, live, HALF: tl.constexpr):
    column = tl.arange(0, HALF)
    pointer = position[:, None] * HALF + column[None, :]
    mask = live[:, None] & (position < positions)[:, None]
    missing = tl.where(live, float("nan"), 0.0)[:, None]
    return tl.load(cos + pointer, mask=mask, other=missing), tl.load(sin + pointer, mask=mask, other=0.0)


@triton.jit
def _zero(base, row, stride, mask, WIDTH: tl.constexpr):
    pointer = base + row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer, tl.zeros([row.shape[0], WIDTH], base.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _probabilities(q1, q2, k1, k2, live, scale_log2):
    """Softmax over the live keys of a tile, fp32, not yet divided by its row sum; and that sum."""
    scores = tl.dot(q1, tl.trans(k1))
    scores = tl.dot(q2, tl.trans(k2), scores)
    scores = tl.where(live[None, :], scores * scale_log2, -float("inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit(do_not_specialize=["rows", "batch", "positions"])
def _forward(q, k, v, out, offsets, cos, sin, rows, batch, positions, heads, scale,
             q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
             BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    program = tl.program_id(0)
    tile = program // heads
    head = (program % heads).to(tl.int64)
    first, end, limit, start = _locate(offsets, batch, tile, rows, BLOCK)
    row = first + tl.arange(0, BLOCK)
    live = row < end
    written = row < limit
    if first >= end:
        if first < limit:
            _zero(out + head * out_head, row, out_row, written, 2 * HALF)
        return
    position = start + tl.arange(0, BLOCK)
    column = tl.arange(0, 2 * HALF)
    q1, q2 = _load_pair(q + head * q_head, row, q_row, live, HALF, INTERLEAVED)
    k1, k2 = _load_pair(k + head * k_head, row, k_row, live, HALF, INTERLEAVED)
    values = tl.load(v + head * v_head + row[:, None] * v_row + column[None, :], mask=live[:, None], other=0.0)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, live, HALF)
        q1, q2 = _rotate(q1, q2, c, s)
        k1, k2 = _rotate(k1, k2, c, s)
    p, total = _probabilities(q1, q2, k1, k2, live, scale * LOG2E)
    o = tl.dot(p.to(values.dtype), values) / total[:, None]
    o = tl.where(live[:, None], o, 0.0).to(out.dtype.element_ty)
    tl.store(out + head * out_head + row[:, None] * out_row + column[None, :], o, mask=written[:, None])


@triton.jit(do_not_specialize=["rows", "batch", "positions"])
def _backward(grad, q, k, v, grad_q, grad_k, grad_v, offsets, cos, sin, rows, batch, positions, heads, scale,
              grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
              BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    program = tl.program_id(0)
    tile = program // heads
    head = (program % heads).to(tl.int64)
    first, end, limit, start = _locate(offsets, batch, tile, rows, BLOCK)
    row = first + tl.arange(0, BLOCK)
    live = row < end
    written = row < limit
    if first >= end:
        if first < limit:
            _zero(grad_q + head * out_head, row, out_row, written, 2 * HALF)
            _zero(grad_k + head * out_head, row, out_row, written, 2 * HALF)
            _zero(grad_v + head * out_head, row, out_row, written, 2 * HALF)
        return
    position = start + tl.arange(0, BLOCK)
    column = tl.arange(0, 2 * HALF)[None, :]
    q1, q2 = _load_pair(q + head * q_head, row, q_row, live, HALF, INTERLEAVED)
    k1, k2 = _load_pair(k + head * k_head, row, k_row, live, HALF, INTERLEAVED)
    g = tl.load(grad + head * grad_head + row[:, None] * grad_row + column, mask=live[:, None], other=0.0)
    values = tl.load(v + head * v_head + row[:, None] * v_row + column, mask=live[:, None], other=0.0)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, live, HALF)
        q1, q2 = _rotate(q1, q2, c, s)
        k1, k2 = _rotate(k1, k2, c, s)
    p, total = _probabilities(q1, q2, k1, k2, live, scale * LOG2E)
    p = p / total[:, None]
    dv = tl.dot(tl.trans(p.to(g.dtype)), g)
    tl.store(grad_v + head * out_head + row[:, None] * out_row + column, dv.to(grad_v.dtype.element_ty),
             mask=written[:, None])
    dp = tl.dot(g, tl.trans(values))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q1.dtype)
    dq1, dq2 = tl.dot(ds, k1), tl.dot(ds, k2)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, live, HALF)
        dq1, dq2 = _rotate(dq1, dq2, c, -s)
    _store_pair(grad_q + head * out_head, row, out_row, written, dq1, dq2, HALF, INTERLEAVED)
    ds = tl.trans(ds)
    dk1, dk2 = tl.dot(ds, q1), tl.dot(ds, q2)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, live, HALF)
        dk1, dk2 = _rotate(dk1, dk2, c, -s)
    _store_pair(grad_k + head * out_head, row, out_row, written, dk1, dk2, HALF, INTERLEAVED)


def _inner_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(kernel, direction: str, inputs: list[Tensor], outputs: list[Tensor], offsets: Tensor, cos: Tensor,
            sin: Tensor, block: int, scale: float, interleaved: bool) -> None:
    rows, heads, dim = outputs[0].shape
    batch = offsets.shape[0] - 1
    if rows == 0 or batch == 0 or heads == 0:
        for out in outputs:
            out.zero_()
        return
    rope = cos.shape[0] > 0
    inputs = [_inner_contiguous(x) for x in inputs]
    strides = [n for x in (*inputs, outputs[0]) for n in x.stride()[:2]]
    kernel[((rows // block + batch) * heads,)](
        *inputs, *outputs, offsets, cos.contiguous(), sin.contiguous(), rows, batch, cos.shape[0], heads, scale,
        *strides, BLOCK=block, HALF=dim // 2, ROPE=rope, INTERLEAVED=rope and interleaved, num_stages=1,
        **CONFIGS[direction, dim, rope])


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                  block: int, scale: float, interleaved: bool) -> Tensor:
    """See `reference.block_forward`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward, "forward", [q, k, v], [out], offsets, cos, sin, block, scale, interleaved)
    return out


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                   max_length: int, block: int, scale: float, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.block_backward`."""
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    _launch(_backward, "backward", [grad, q, k, v], outs, offsets, cos, sin, block, scale, interleaved)
    return outs[0], outs[1], outs[2]
