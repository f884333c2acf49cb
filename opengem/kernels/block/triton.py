"""Block attention on a GPU: one program per tile of 64 rows and head, everything of a tile on chip.

A 64x64 tile is bound by memory (32 FLOP a byte), so the kernels are plain: read q, k, v once, write once, several CTAs
an SM to hide latency. A tile holds whole softmax rows: no running maximum, no log-sum-exp in memory, and the backward's
delta is a row sum of registers. With RoPE, q and k are rotated after the load and their fp32 gradients before the
store. Inside the kernel the members of a pair lie side by side whichever the convention, which the scores do not mind
and which makes taking x
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
    ("forward", 128, True): {"num_warps": 4, "maxnreg": 168},
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
def _load(base, row, stride, live, HALF: tl.constexpr):
    """Rows of `[.., 2 * HALF]`, zeros where not live."""
    pointer = base + row[:, None] * stride + tl.arange(0, 2 * HALF)[None, :]
    return tl.load(pointer, mask=live[:, None], other=0.0)


@triton.jit
def _store(base, row, stride, mask, values, HALF: tl.constexpr):
    pointer = base + row[:, None] * stride + tl.arange(0, 2 * HALF)[None, :]
    tl.store(pointer, values.to(base.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _split(values, HALF: tl.constexpr):
    """Even and odd columns."""
    return tl.split(tl.reshape(values, [values.shape[0], HALF, 2]))


@triton.jit
def _join(even, odd, HALF: tl.constexpr):
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * HALF])


@triton.jit
def _load_rotated(base, row, stride, live, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotated rows with the members of a pair side by side, whichever the convention: scores do not mind the order."""
    if INTERLEAVED:
        first, second = _split(_load(base, row, stride, live, HALF), HALF)
    else:
        pointer = base + row[:, None] * stride + tl.arange(0, HALF)[None, :]
        first = tl.load(pointer, mask=live[:, None], other=0.0)
        second = tl.load(pointer + HALF, mask=live[:, None], other=0.0)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return _join((first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind), HALF)


@triton.jit
def _store_rotated_back(base, row, stride, mask, values, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Undo `_load_rotated` on a gradient and store it."""
    kind = base.dtype.element_ty
    first, second = _split(values, HALF)
    first, second = (first * cos + second * sin).to(kind), (second * cos - first * sin).to(kind)
    if INTERLEAVED:
        _store(base, row, stride, mask, _join(first, second, HALF), HALF)
    else:
        pointer = base + row[:, None] * stride + tl.arange(0, HALF)[None, :]
        tl.store(pointer, first, mask=mask[:, None])
        tl.store(pointer + HALF, second, mask=mask[:, None])


@triton.jit
def _angles(cos, sin, position, positions, HALF: tl.constexpr, KEEP: tl.constexpr):
    """cos and sin rows of a tile; the last table row stands for positions past it, which only dead rows have.

    They are loaded for each use, which comes from L1: held in registers they would halve the CTAs an SM. KEEP: further
    uses follow, and must not be merged with this one.
    """
    pointer = tl.minimum(position, positions - 1)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    policy: tl.constexpr = "evict_last" if KEEP else ""
    return tl.load(cos + pointer, eviction_policy=policy), tl.load(sin + pointer, eviction_policy=policy)


@triton.jit
def _zero(base, row, stride, mask, HALF: tl.constexpr):
    _store(base, row, stride, mask, tl.zeros([row.shape[0], 2 * HALF], tl.float32), HALF)


@triton.jit
def _probabilities(q, k, live, scale_log2):
    """Softmax over the live keys of a tile, fp32, not yet divided by its row sum; and that sum."""
    scores = tl.where(live[None, :], tl.dot(q, tl.trans(k)) * scale_log2, -float("inf"))
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
            _zero(out + head * out_head, row, out_row, written, HALF)
        return
    if ROPE:
        position = start + tl.arange(0, BLOCK)
        c, s = _angles(cos, sin, position, positions, HALF, True)
        queries = _load_rotated(q + head * q_head, row, q_row, live, c, s, HALF, INTERLEAVED)
        c, s = _angles(cos, sin, position, positions, HALF, False)
        keys = _load_rotated(k + head * k_head, row, k_row, live, c, s, HALF, INTERLEAVED)
    else:
        queries = _load(q + head * q_head, row, q_row, live, HALF)
        keys = _load(k + head * k_head, row, k_row, live, HALF)
    values = _load(v + head * v_head, row, v_row, live, HALF)
    p, total = _probabilities(queries, keys, live, scale * LOG2E)
    o = tl.dot(p.to(values.dtype), values) / total[:, None]
    _store(out + head * out_head, row, out_row, written, tl.where(live[:, None], o, 0.0), HALF)


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
            _zero(grad_q + head * out_head, row, out_row, written, HALF)
            _zero(grad_k + head * out_head, row, out_row, written, HALF)
            _zero(grad_v + head * out_head, row, out_row, written, HALF)
        return
    position = start + tl.arange(0, BLOCK)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, HALF, True)
        queries = _load_rotated(q + head * q_head, row, q_row, live, c, s, HALF, INTERLEAVED)
        c, s = _angles(cos, sin, position, positions, HALF, False)
        keys = _load_rotated(k + head * k_head, row, k_row, live, c, s, HALF, INTERLEAVED)
    else:
        queries = _load(q + head * q_head, row, q_row, live, HALF)
        keys = _load(k + head * k_head, row, k_row, live, HALF)
    g = _load(grad + head * grad_head, row, grad_row, live, HALF)
    values = _load(v + head * v_head, row, v_row, live, HALF)
    p, total = _probabilities(queries, keys, live, scale * LOG2E)
    p = p / total[:, None]
    _store(grad_v + head * out_head, row, out_row, written, tl.dot(tl.trans(p.to(g.dtype)), g), HALF)
    dp = tl.dot(g, tl.trans(values))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(queries.dtype)
    dq = tl.dot(ds, keys)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, HALF, False)
        _store_rotated_back(grad_q + head * out_head, row, out_row, written, dq, c, s, HALF, INTERLEAVED)
    else:
        _store(grad_q + head * out_head, row, out_row, written, dq, HALF)
    dk = tl.dot(tl.trans(ds), queries)
    if ROPE:
        c, s = _angles(cos, sin, position, positions, HALF, False)
        _store_rotated_back(grad_k + head * out_head, row, out_row, written, dk, c, s, HALF, INTERLEAVED)
    else:
        _store(grad_k + head * out_head, row, out_row, written, dk, HALF)


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
