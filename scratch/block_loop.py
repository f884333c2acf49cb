"""Block attention on a GPU: one program per tile of 64 rows and head, everything of a tile on chip.

A 64x64 tile is bound by memory (32 FLOP a byte), so the kernels are plain: read q, k, v once, all loads under way
before the first product waits, write once, several CTAs an SM to hide latency. A tile holds whole softmax rows: no
running maximum, no log-sum-exp in memory, and the backward's delta is a row sum of registers.

With RoPE a row is held as the first and the second members of its pairs, two `[64, D / 2]` tiles whichever the
convention: `q k^T` is the sum of two products, and each half of a gradient a product of its own, so that rotating moves
nothing between threads. cos and sin are read as one word of two fp16 numbers: as fp32 they would be as large as q and k
together, and rounding them adds an eighth of what rounding the rotated rows to bf16 does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARE = 4
LOG2E = tl.constexpr(1.4426950408889634)

# (direction, head dim, rope) -> launch options; one choice each, so that bits never depend on tuning
CONFIGS = {
    ("forward", 64, False): {"num_warps": 4, "maxnreg": 128},
    ("forward", 128, False): {"num_warps": 4, "maxnreg": 128},
    ("forward", 64, True): {"num_warps": 4, "maxnreg": 128},
    ("forward", 128, True): {"num_warps": 4, "maxnreg": 128},
    ("backward", 64, False): {"num_warps": 4, "maxnreg": 128},
    ("backward", 128, False): {"num_warps": 4, "maxnreg": 168},
    ("backward", 64, True): {"num_warps": 4, "maxnreg": 128},
    ("backward", 128, True): {"num_warps": 4, "maxnreg": 168},
}
DEAD = tl.constexpr(-1e30)  # score of a key outside the sample; finite, so that a tile without keys gives no NaN


@triton.jit
def _locate(offsets, batch, tile, rows, BLOCK: tl.constexpr):
    """(first row, end of its sample, end of what to write, position of the first row) of a tile.

    A search of 32 ways, one lane each: three dependent loads for a thousand samples, where halving takes ten. The last
    sample also writes zeros to rows behind the last offset.
    """
    low = tile * 0
    high = low + batch
    while high - low > 1:
        step = tl.cdiv(high - low, 32)
        probe = low + step * tl.arange(0, 32)
        inside = probe < high
        first_tile = tl.load(offsets + probe, mask=inside, other=0).to(tl.int64) // BLOCK + probe
        ours = tl.sum((inside & (first_tile <= tile)).to(tl.int32), 0)
        low += step * tl.maximum(ours - 1, 0)
        high = tl.minimum(high, low + step)
    begin = tl.load(offsets + low).to(tl.int64)
    end = tl.load(offsets + low + 1).to(tl.int64)
    position = (tile - begin // BLOCK - low) * BLOCK
    limit = tl.where(low == batch - 1, rows, end)
    return begin + position, end, limit, position


@triton.jit
def _load(tile, row, stride, live, WIDTH: tl.constexpr):
    """Rows of `[.., WIDTH]` from `tile` on, zeros where not live. Offsets in a tile are 32 bits: fewer registers."""
    offset = row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(tile + offset, mask=live[:, None], other=0.0)


@triton.jit
def _store(tile, row, stride, mask, values, WIDTH: tl.constexpr):
    offset = row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(tile + offset, values.to(tile.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _load_pairs(tile, row, stride, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of the pairs of each row, `[.., HALF]` each."""
    if INTERLEAVED:
        return tl.split(tl.reshape(_load(tile, row, stride, live, 2 * HALF), [live.shape[0], HALF, 2]))
    else:
        return _load(tile, row, stride, live, HALF), _load(tile + HALF, row, stride, live, HALF)


@triton.jit
def _rotate(first, second, cos, sin):
    """The rotated pair. Sums over a joined axis, because the compiler would move the change of layout that a product
    wants above a plain sum, to before each load, and so wait for the loads one after the other."""
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    first, second = tl.join(first * cos, -second * sin), tl.join(second * cos, first * sin)
    return tl.sum(first, 2).to(kind), tl.sum(second, 2).to(kind)


@triton.jit
def _store_rotated_back(tile, row, stride, mask, first, second, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Undo the rotation on a gradient in fp32 and store it."""
    kind = tile.dtype.element_ty
    first, second = (first * cos + second * sin).to(kind), (second * cos - first * sin).to(kind)
    if INTERLEAVED:
        _store(tile, row, stride, mask, tl.reshape(tl.join(first, second), [mask.shape[0], 2 * HALF]), 2 * HALF)
    else:
        _store(tile, row, stride, mask, first, HALF)
        _store(tile + HALF, row, stride, mask, second, HALF)


@triton.jit
def _angles(turns, row, start, positions, HALF: tl.constexpr):
    """cos and sin, fp32, of the positions from `start` on; those past the table belong to dead rows and get the last.

    Loaded again for each use: held in registers they would halve the CTAs an SM.
    """
    row = tl.minimum(row, (positions - 1 - start).to(tl.int32))
    offset = row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    word = tl.load(turns + start * HALF + offset, eviction_policy="evict_last")
    cos = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    sin = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _softmax(scores, live, scale_log2):
    """Softmax over the live keys of a tile, fp32, not yet divided by its row sum; and that sum."""
    scores = tl.where(live[None, :], scores * scale_log2, DEAD)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit(do_not_specialize=["rows", "batch", "positions", "share"])
def _forward(q, k, v, out, offsets, turns, rows, batch, positions, heads, share, scale,
             q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
             BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    parts = tl.cdiv(heads, share)
    first, end, limit, start = _locate(offsets, batch, tl.program_id(0) // parts, rows, BLOCK)
    if first >= limit:
        return
    first_head = tl.program_id(0) % parts * share
    for number in range(first_head, tl.minimum(first_head + share, heads)):
        head = number.to(tl.int64)
        row = tl.arange(0, BLOCK) + tl.load(offsets).to(tl.int32)
        live = row < end - first
        written = row < limit - first
        queries = q + first * q_row + head * q_head
        keys = k + first * k_row + head * k_head
        values = _load(v + first * v_row + head * v_head, row, v_row, live, 2 * HALF)
        if ROPE:
            q1, q2 = _load_pairs(queries, row, q_row, live, HALF, INTERLEAVED)
            k1, k2 = _load_pairs(keys, row, k_row, live, HALF, INTERLEAVED)
            cos, sin = _angles(turns, row, start, positions, HALF)
            q1, q2 = _rotate(q1, q2, cos, sin)
            k1, k2 = _rotate(k1, k2, cos, sin)
            scores = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1)))
        else:
            scores = tl.dot(_load(queries, row, q_row, live, 2 * HALF), tl.trans(_load(keys, row, k_row, live, 2 * HALF)))
        p, total = _softmax(scores, live, scale * LOG2E)
        o = tl.dot(p.to(values.dtype), values) / total[:, None]
        _store(out + first * out_row + head * out_head, row, out_row, written, tl.where(live[:, None], o, 0.0), 2 * HALF)


@triton.jit(do_not_specialize=["rows", "batch", "positions", "share"])
def _backward(grad, q, k, v, grad_q, grad_k, grad_v, offsets, turns, rows, batch, positions, heads, share, scale,
              grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
              BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    parts = tl.cdiv(heads, share)
    first, end, limit, start = _locate(offsets, batch, tl.program_id(0) // parts, rows, BLOCK)
    if first >= limit:
        return
    first_head = tl.program_id(0) % parts * share
    for number in range(first_head, tl.minimum(first_head + share, heads)):
        head = number.to(tl.int64)
        row = tl.arange(0, BLOCK) + tl.load(offsets).to(tl.int32)
        live = row < end - first
        written = row < limit - first
        queries = q + first * q_row + head * q_head
        keys = k + first * k_row + head * k_head
        out = first * out_row + head * out_head
        upstream = grad + first * grad_row + head * grad_head
        source = v + first * v_row + head * v_head
        if ROPE:
            q1, q2 = _load_pairs(queries, row, q_row, live, HALF, INTERLEAVED)
            k1, k2 = _load_pairs(keys, row, k_row, live, HALF, INTERLEAVED)
            cos, sin = _angles(turns, row, start, positions, HALF)
            q1, q2 = _rotate(q1, q2, cos, sin)
            k1, k2 = _rotate(k1, k2, cos, sin)
            scores = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1)))
            g = _load(upstream, row, grad_row, live, 2 * HALF)  # only now: they take the room of the product's own copy of q
            values = _load(source, row, v_row, live, 2 * HALF)
        else:
            g = _load(upstream, row, grad_row, live, 2 * HALF)
            values = _load(source, row, v_row, live, 2 * HALF)
            queries = _load(queries, row, q_row, live, 2 * HALF)
            keys = _load(keys, row, k_row, live, 2 * HALF)
            scores = tl.dot(queries, tl.trans(keys))
        p, total = _softmax(scores, live, scale * LOG2E)
        p = p / total[:, None]
        dp = tl.dot(g, tl.trans(values))
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(g.dtype)
        _store(grad_v + out, row, out_row, written, tl.dot(tl.trans(p.to(g.dtype)), g), 2 * HALF)
        if ROPE:
            d1, d2 = tl.dot(ds, k1), tl.dot(ds, k2)
            cos, sin = _angles(turns, row, start, positions, HALF)
            _store_rotated_back(grad_q + out, row, out_row, written, d1, d2, cos, sin, HALF, INTERLEAVED)
            d1, d2 = tl.dot(tl.trans(ds), q1), tl.dot(tl.trans(ds), q2)
            cos, sin = _angles(turns, row, start, positions, HALF)
            _store_rotated_back(grad_k + out, row, out_row, written, d1, d2, cos, sin, HALF, INTERLEAVED)
        else:
            _store(grad_q + out, row, out_row, written, tl.dot(ds, keys), 2 * HALF)
            _store(grad_k + out, row, out_row, written, tl.dot(tl.trans(ds), queries), 2 * HALF)


def _plain_rows(x: Tensor) -> Tensor:
    """x with adjacent elements in a row and 64 rows within 2^31 elements."""
    return x if x.stride(2) == 1 and x.stride(0) < 1 << 25 else x.contiguous()


def _turns(cos: Tensor, sin: Tensor, positions: int) -> Tensor:
    """int32 `[positions, D / 2]`: cos in the low and sin in the high half of a word, both fp16."""
    if cos.shape[0] == 0:
        return cos.view(torch.int32)
    pair = torch.stack((cos[:positions], sin[:positions]), 2).half()
    return pair.view(torch.int32).squeeze(2)


def _launch(kernel, direction: str, inputs: list[Tensor], outputs: list[Tensor], offsets: Tensor, cos: Tensor,
            sin: Tensor, max_length: int, block: int, scale: float, interleaved: bool) -> None:
    rows, heads, dim = outputs[0].shape
    batch = offsets.shape[0] - 1
    if rows == 0 or batch == 0 or heads == 0:
        for out in outputs:
            out.zero_()
        return
    rope = cos.shape[0] > 0
    turns = _turns(cos, sin, max(1, max_length))
    inputs = [_plain_rows(x) for x in inputs]
    strides = [n for x in (*inputs, outputs[0]) for n in x.stride()[:2]]
    kernel[((rows // block + batch) * triton.cdiv(heads, SHARE),)](
        *inputs, *outputs, offsets, turns, rows, batch, turns.shape[0], heads, SHARE, scale, *strides, BLOCK=block,
        HALF=dim // 2, ROPE=rope, INTERLEAVED=rope and interleaved, num_stages=1, **CONFIGS[direction, dim, rope])


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                  block: int, scale: float, interleaved: bool) -> Tensor:
    """See `reference.block_forward`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward, "forward", [q, k, v], [out], offsets, cos, sin, max_length, block, scale, interleaved)
    return out


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                   max_length: int, block: int, scale: float, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.block_backward`."""
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    _launch(_backward, "backward", [grad, q, k, v], outs, offsets, cos, sin, max_length, block, scale, interleaved)
    return outs[0], outs[1], outs[2]
