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

from opengem.kernels.block.reference import side_by_side
from opengem.kernels.launch import kind_of, launch

LOG2E = tl.constexpr(1.4426950408889634)

# (direction, head dim) -> registers a thread of the four warps; one choice each, so that bits never depend on tuning
REGISTERS = {("forward", 64): 128, ("forward", 128): 128, ("backward", 64): 128, ("backward", 128): 168}
DEAD = tl.constexpr(-1e30)  # score of a key outside the sample; finite, so that a tile without keys gives no NaN


@triton.jit(do_not_specialize=["rows", "batch", "tiles"])
def _map(offsets, place, rows, batch, tiles, BLOCK: tl.constexpr, SLOTS: tl.constexpr, BY_ROW: tl.constexpr):
    """`place` int64 `[tiles, 2]`: first row; position << 16 | rows to write << 8 | live rows. A program takes a sample.

    The position is where the angles of the first row stand: its place in the sample, or BY_ROW the row itself.
    The last sample also owns the rows behind the last offset: they are written (zeros) but not live.
    """
    sample = tl.program_id(0)
    last = sample == batch - 1
    begin = tl.load(offsets + sample).to(tl.int64)
    end = tl.load(offsets + sample + 1).to(tl.int64)
    limit = tl.where(last, rows, end)
    tile = begin // BLOCK + sample
    count = tl.where(last, tiles, end // BLOCK + sample + 1) - tile
    for start in range(0, count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        position = slot.to(tl.int64) * BLOCK
        first = begin + position
        live = tl.minimum(tl.maximum(end - first, 0), BLOCK)
        written = tl.minimum(tl.maximum(limit - first, 0), BLOCK)
        if BY_ROW:
            position = first
        target = place + 2 * (tile + slot)
        tl.store(target, first, mask=slot < count)
        tl.store(target + 1, position << 16 | written << 8 | live, mask=slot < count)


@triton.jit(do_not_specialize=["count"])
def _pack(cos, sin, turns, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low = tl.load(cos + at, mask=at < count).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = tl.load(sin + at, mask=at < count).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    tl.store(turns + at, (high << 16 | low).to(tl.int32, bitcast=True), mask=at < count)


@triton.jit
def _locate(place, tile):
    """(first row, live rows, rows to write, position of the first row) of a tile: one load, not a search."""
    first = tl.load(place + 2 * tile, eviction_policy="evict_last")
    packed = tl.load(place + 2 * tile + 1, eviction_policy="evict_last")
    return first, (packed & 0xFF).to(tl.int32), (packed >> 8 & 0xFF).to(tl.int32), packed >> 16


@triton.jit
def _load(tile, stride, live, WIDTH: tl.constexpr):
    """Rows of `[.., WIDTH]` from `tile` on, zeros where not live. Offsets in a tile are 32 bits: fewer registers."""
    offset = tl.arange(0, live.shape[0])[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(tile + offset, mask=live[:, None], other=0.0)


@triton.jit
def _store(tile, stride, mask, values, WIDTH: tl.constexpr):
    offset = tl.arange(0, mask.shape[0])[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(tile + offset, values.to(tile.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _load_pairs(tile, stride, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of the pairs of each row, `[.., HALF]` each."""
    if INTERLEAVED:
        return tl.split(tl.reshape(_load(tile, stride, live, 2 * HALF), [live.shape[0], HALF, 2]))
    else:
        return _load(tile, stride, live, HALF), _load(tile + HALF, stride, live, HALF)


@triton.jit
def _rotate(first, second, cos, sin):
    """The rotated pair. Sums over a joined axis, because the compiler would move the change of layout that a product
    wants above a plain sum, to before each load, and so wait for the loads one after the other."""
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    first, second = tl.join(first * cos, -second * sin), tl.join(second * cos, first * sin)
    return tl.sum(first, 2).to(kind), tl.sum(second, 2).to(kind)


@triton.jit
def _store_rotated_back(tile, stride, mask, first, second, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Undo the rotation on a gradient in fp32 and store it."""
    kind = tile.dtype.element_ty
    first, second = (first * cos + second * sin).to(kind), (second * cos - first * sin).to(kind)
    if INTERLEAVED:
        _store(tile, stride, mask, tl.reshape(tl.join(first, second), [mask.shape[0], 2 * HALF]), 2 * HALF)
    else:
        _store(tile, stride, mask, first, HALF)
        _store(tile + HALF, stride, mask, second, HALF)


@triton.jit
def _angles(turns, start, positions, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """cos and sin, fp32, of the positions from `start` on; those past the table belong to dead rows and get the last.

    Loaded again for each use: held in registers they would halve the CTAs an SM.
    """
    row = tl.minimum(tl.arange(0, BLOCK), (positions - 1 - start).to(tl.int32))
    offset = row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    word = tl.load(turns + start * HALF + offset, eviction_policy="evict_last")
    cos = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    sin = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _rotated_scores(q, q_row, k, k_row, live, turns, start, positions, BLOCK: tl.constexpr, HALF: tl.constexpr,
                    INTERLEAVED: tl.constexpr):
    """(q k^T of rotated rows, the members of the pairs of q and of k)."""
    q1, q2 = _load_pairs(q, q_row, live, HALF, INTERLEAVED)
    k1, k2 = _load_pairs(k, k_row, live, HALF, INTERLEAVED)
    cos, sin = _angles(turns, start, positions, BLOCK, HALF)
    q1, q2 = _rotate(q1, q2, cos, sin)
    k1, k2 = _rotate(k1, k2, cos, sin)
    return tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1))), q1, q2, k1, k2


@triton.jit
def _softmax(scores, live, scale_log2):
    """Softmax over the live keys of a tile, fp32, not yet divided by its row sum; and that sum."""
    scores = tl.where(live[None, :], scores * scale_log2, DEAD)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit(do_not_specialize=["positions"])
def _forward(q, k, v, out, place, turns, positions, heads, scale,
             q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
             BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    head = (tl.program_id(0) % heads).to(tl.int64)
    first, count, written, start = _locate(place, tl.program_id(0) // heads)
    if written == 0:
        return
    live = tl.arange(0, BLOCK) < count
    q += first * q_row + head * q_head
    k += first * k_row + head * k_head
    values = _load(v + first * v_row + head * v_head, v_row, live, 2 * HALF)
    if ROPE:
        scores = _rotated_scores(q, q_row, k, k_row, live, turns, start, positions, BLOCK, HALF, INTERLEAVED)[0]
    else:
        queries = _load(q, q_row, live, 2 * HALF)
        keys = _load(k, k_row, live, 2 * HALF)
        scores = tl.dot(queries, tl.trans(keys))
    p, total = _softmax(scores, live, scale * LOG2E)
    o = tl.dot(p.to(values.dtype), values) / total[:, None]
    written = tl.arange(0, BLOCK) < written
    _store(out + first * out_row + head * out_head, out_row, written, tl.where(live[:, None], o, 0.0), 2 * HALF)


@triton.jit(do_not_specialize=["positions"])
def _backward(grad, q, k, v, grad_q, grad_k, grad_v, place, turns, positions, heads, scale,
              grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
              BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    head = (tl.program_id(0) % heads).to(tl.int64)
    first, count, written, start = _locate(place, tl.program_id(0) // heads)
    if written == 0:
        return
    live = tl.arange(0, BLOCK) < count
    written = tl.arange(0, BLOCK) < written
    q += first * q_row + head * q_head
    k += first * k_row + head * k_head
    out = first * out_row + head * out_head
    grad += first * grad_row + head * grad_head
    v += first * v_row + head * v_head
    if ROPE:
        scores, q1, q2, k1, k2 = _rotated_scores(q, q_row, k, k_row, live, turns, start, positions, BLOCK, HALF,
                                                 INTERLEAVED)
        g = _load(grad, grad_row, live, 2 * HALF)  # only now: they take the room of the product's own copy of q
        values = _load(v, v_row, live, 2 * HALF)
    else:
        g = _load(grad, grad_row, live, 2 * HALF)
        values = _load(v, v_row, live, 2 * HALF)
        queries = _load(q, q_row, live, 2 * HALF)
        keys = _load(k, k_row, live, 2 * HALF)
        scores = tl.dot(queries, tl.trans(keys))
    p, total = _softmax(scores, live, scale * LOG2E)
    p = p / total[:, None]
    dp = tl.dot(g, tl.trans(values))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(g.dtype)
    _store(grad_v + out, out_row, written, tl.dot(tl.trans(p.to(g.dtype)), g), 2 * HALF)
    if ROPE:
        d1, d2 = tl.dot(ds, k1), tl.dot(ds, k2)
        cos, sin = _angles(turns, start, positions, BLOCK, HALF)
        _store_rotated_back(grad_q + out, out_row, written, d1, d2, cos, sin, HALF, INTERLEAVED)
        d1, d2 = tl.dot(tl.trans(ds), q1), tl.dot(tl.trans(ds), q2)
        cos, sin = _angles(turns, start, positions, BLOCK, HALF)
        _store_rotated_back(grad_k + out, out_row, written, d1, d2, cos, sin, HALF, INTERLEAVED)
    else:
        _store(grad_q + out, out_row, written, tl.dot(ds, keys), 2 * HALF)
        _store(grad_k + out, out_row, written, tl.dot(tl.trans(ds), queries), 2 * HALF)


def _plain_rows(x: Tensor) -> Tensor:
    """x with adjacent elements in a row and 64 rows within 2^31 elements."""
    return x if x.stride(2) == 1 and x.stride(0) < 1 << 25 else x.contiguous()


def pack(cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.pack`."""
    turns = torch.empty(cos.shape, dtype=torch.int32, device=cos.device)
    cos, sin, count = cos.contiguous(), sin.contiguous(), turns.numel()
    if count:
        launch(_pack, (triton.cdiv(count, 1024), 1, 1), kind_of(cos, sin), (cos, sin, turns, count), (1024,))
    return turns


def any_tile(outputs: list[Tensor], offsets: Tensor) -> bool:
    """Whether there is anything to compute; if not, the outputs are set to zero."""
    if outputs[0].numel() and offsets.shape[0] > 1:
        return True
    for out in outputs:
        out.zero_()
    return False


def prepare(rows: int, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int, block: int,
            by_row: bool) -> tuple[Tensor, Tensor, bool]:
    """(map of tiles, table of turns, whether there is a rotation)."""
    rope, batch = cos.shape[0] > 0, offsets.shape[0] - 1
    turns = cos
    if rope and cos.dtype != torch.int32:
        needed = cos.shape[0] if by_row else min(cos.shape[0], max(1, max_length))
        turns = pack(cos[:needed], sin[:needed])
    tiles = rows // block + batch
    place = torch.empty((tiles, 2), dtype=torch.int64, device=offsets.device)
    launch(_map, (batch, 1, 1), kind_of(offsets), (offsets, place, rows, batch, tiles), (block, 32, by_row), warps=1)
    return place, turns, rope


def _launch(kernel, direction: str, inputs: list[Tensor], outputs: list[Tensor], offsets: Tensor, cos: Tensor,
            sin: Tensor, max_length: int, block: int, scale: float, interleaved: bool, by_row: bool) -> None:
    rows, heads, dim = outputs[0].shape
    if not any_tile(outputs, offsets):
        return
    place, turns, rope = prepare(rows, offsets, cos, sin, max_length, block, by_row)
    inputs = [_plain_rows(x) for x in inputs]
    strides = [n for x in (*inputs, outputs[0]) for n in x.stride()[:2]]
    launch(kernel, (place.shape[0] * heads, 1, 1), kind_of(*inputs, facts=(heads, *strides)),
           (*inputs, *outputs, place, turns, turns.shape[0], heads, scale, *strides),
           (block, dim // 2, rope, rope and interleaved), stages=1, registers=REGISTERS[direction, dim])


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                  block: int, scale: float, interleaved: bool, by_row: bool) -> Tensor:
    """See `reference.block_forward`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward, "forward", [q, k, v], [out], offsets, cos, sin, max_length, block, scale, interleaved, by_row)
    return out


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                   max_length: int, block: int, scale: float, interleaved: bool,
                   by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.block_backward`."""
    outs = side_by_side(q, q.shape[0])
    _launch(_backward, "backward", [grad, q, k, v], list(outs), offsets, cos, sin, max_length, block, scale,
            interleaved, by_row)
    return outs
