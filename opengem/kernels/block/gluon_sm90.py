"""Block attention on Hopper in Gluon: a tile's rows come by TMA, straight to where the tensor cores read them.

The kernels do what those of `triton.py` do, with the same bits but for interleaved pairs: one tile of 64 rows and one
head a program. There the rows pass through registers, and those rows under way are what fills a multiprocessor; here
they take none, nor does anything wait for them but the product that needs them. A tile that reaches past its sample
brings rows of the next one; they are overwritten with zeros.

A row is held as its two halves. With RoPE a half is rotated in place before the first product (half-split pairs lie
across the halves, interleaved ones inside), and gradients, still fp32 in registers, before they are rounded. The words
of cos and sin (`triton.pack`) are loaded once, while the rows are under way, and stay in registers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.block import triton as portable
from opengem.kernels.block.reference import side_by_side
from opengem.kernels.launch import aligned, described, kind_of, launch

LOG2E = gl.constexpr(1.4426950408889634)
DEAD = gl.constexpr(-1e30)  # score of a key outside the sample
REGISTERS = {64: 128, 128: 168}  # a thread of the backward, by head dim: what lets four or three CTAs share an SM


@gluon.jit
def _locate(place, tile):
    """(first row, live rows, rows to write, position of the first row) of a tile, from the map of `triton._map`."""
    first = gl.load(place + 2 * tile)
    packed = gl.load(place + 2 * tile + 1)
    return first, (packed & 0xFF).to(gl.int32), (packed >> 8 & 0xFF).to(gl.int32), packed >> 16


@gluon.jit
def _fetch(desc, tiles, row, column, ready, HALF: gl.constexpr):
    tma.async_copy_global_to_shared(desc, [row, column], ready, tiles.index(0))
    tma.async_copy_global_to_shared(desc, [row, column + HALF], ready, tiles.index(1))


@gluon.jit
def _end(ready):
    """Without this the compiler gives the barriers' memory to a tile once they were waited for, but the SM holds them
    in a cache of its own: written back when another process takes its turn, they overwrite the tile."""
    mbarrier.invalidate(ready.index(0))
    mbarrier.invalidate(ready.index(1))


@gluon.jit
def _clear(tiles, count, HALF: gl.constexpr):
    """Zeros in the rows of other samples: 0 * NaN is not 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    live = (gl.arange(0, 64, gl.SliceLayout(1, layout)) < count)[:, None]
    for half in gl.static_range(2):
        values = tiles.index(half).load(layout)
        tiles.index(half).store(gl.where(live, values, gl.zeros_like(values)))


@gluon.jit
def _words(turns, start, positions, FIRST: gl.constexpr, WIDTH: gl.constexpr, HALF: gl.constexpr):
    """Words of cos and sin for `WIDTH` pairs from `FIRST` on; positions past the table belong to dead rows."""
    each: gl.constexpr = 8 * WIDTH // HALF
    layout: gl.constexpr = gl.BlockedLayout([1, each], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    row = gl.minimum(row, (positions - 1 - start).to(gl.int32))
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return gl.load(turns + start * HALF + (row[:, None] * HALF + column[None, :]), eviction_policy="evict_last")


@gluon.jit
def _load_words(turns, start, positions, HALF: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Words for the pairs of the first and of the second half of a row: the same, unless pairs lie side by side."""
    if INTERLEAVED:
        first = _words(turns, start, positions, 0, HALF // 2, HALF)
        return first, _words(turns, start, positions, HALF // 2, HALF // 2, HALF)
    else:
        both = _words(turns, start, positions, 0, HALF, HALF)
        return both, both


@gluon.jit
def _turn(first, second, word, BACK: gl.constexpr):
    """The pair rotated by the angle of `word`, or by minus that angle."""
    cos = (word & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    sin = (word >> 16).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    if BACK:
        return first * cos + second * sin, second * cos - first * sin
    else:
        return first * cos - second * sin, second * cos + first * sin


@gluon.jit
def _turn_half(half, word, BACK: gl.constexpr, HALF: gl.constexpr):
    """A half of interleaved pairs, rotated."""
    first, second = gl.split(gl.reshape(half, [64, HALF // 2, 2]))
    layout: gl.constexpr = first.type.layout
    first, second = _turn(first, second, gl.convert_layout(word, layout), BACK)
    return gl.convert_layout(gl.reshape(gl.join(first, second), [64, HALF]), half.type.layout)


@gluon.jit
def _rotate(tiles, words, HALF: gl.constexpr, INTERLEAVED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    first = tiles.index(0).load(layout).to(gl.float32)
    second = tiles.index(1).load(layout).to(gl.float32)
    if INTERLEAVED:
        first = _turn_half(first, words[0], False, HALF)
        second = _turn_half(second, words[1], False, HALF)
    else:
        first, second = _turn(first, second, words[0], False)
    tiles.index(0).store(first.to(tiles.dtype))
    tiles.index(1).store(second.to(tiles.dtype))


@gluon.jit
def _scores(a, b, LAYOUT: gl.constexpr):
    """a b^T, summed over both halves."""
    s = gl.zeros([64, 64], gl.float32, LAYOUT)
    s = warpgroup_mma(a.index(0), b.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(a.index(1), b.index(1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _product(a, b, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """a b, the halves of b's rows one by one. a and b are alive until both products are done."""
    zero = gl.zeros([64, HALF], gl.float32, LAYOUT)
    first = warpgroup_mma(a, b.index(0), zero, use_acc=False, is_async=True)
    second = warpgroup_mma(a, b.index(1), zero, use_acc=False, is_async=True)
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    b._keep_alive()
    return first, second


@gluon.jit
def _softmax(s, count, scale_log2, LAYOUT: gl.constexpr):
    """Softmax over the live keys, not yet divided by its row sum; and that sum."""
    live = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)) < count
    s = gl.where(live[None, :], s * scale_log2, DEAD)
    p = gl.exp2(s - gl.max(s, 1)[:, None])
    return p, gl.sum(p, 1)


@gluon.jit
def _store(base, stride, half, written, HALF: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    value = gl.convert_layout(half.to(base.dtype.element_ty), layout)
    gl.store(base + (row[:, None] * stride + column[None, :]), value, mask=(row < written)[:, None])


@gluon.jit
def _store_gradient(base, stride, first, second, words, written, HALF: gl.constexpr, ROPE: gl.constexpr,
                    INTERLEAVED: gl.constexpr):
    """Rows that are not live came out as zeros, since the rows they were made of are."""
    if ROPE:
        if INTERLEAVED:
            first = _turn_half(first, words[0], True, HALF)
            second = _turn_half(second, words[1], True, HALF)
        else:
            first, second = _turn(first, second, gl.convert_layout(words[0], first.type.layout), True)
    _store(base, stride, first, written, HALF)
    _store(base + HALF, stride, second, written, HALF)


@gluon.jit(do_not_specialize=["positions"])
def _forward(q_desc, k_desc, v_desc, out, place, turns, positions, heads, scale, HALF: gl.constexpr,
             ROPE: gl.constexpr, INTERLEAVED: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    head = gl.program_id(0) % heads
    first, count, written, start = _locate(place, gl.program_id(0) // heads)
    if written > 0:
        q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        v = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        row, column = first.to(gl.int32), head * (2 * HALF)
        mbarrier.expect(ready.index(0), 4 * q_desc.block_type.nbytes)
        _fetch(q_desc, q, row, column, ready.index(0), HALF)
        _fetch(k_desc, k, row, column, ready.index(0), HALF)
        mbarrier.expect(ready.index(1), 2 * q_desc.block_type.nbytes)
        _fetch(v_desc, v, row, column, ready.index(1), HALF)
        words = 0, 0
        if ROPE:
            words = _load_words(turns, start, positions, HALF, INTERLEAVED)
        mbarrier.wait(ready.index(0), 0)
        if ROPE:
            _rotate(q, words, HALF, INTERLEAVED)
            _rotate(k, words, HALF, INTERLEAVED)
            fence_async_shared()
        p, total = _softmax(_scores(q, k, s_layout), count, scale * LOG2E, s_layout)
        mbarrier.wait(ready.index(1), 0)
        if count < 64:
            _clear(v, count, HALF)
            fence_async_shared()
        p = gl.convert_layout(p.to(q_desc.dtype), gl.DotOperandLayout(0, o_layout, 2))
        o1, o2 = _product(p, v, HALF, o_layout)
        total = gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        live = (gl.arange(0, 64, gl.SliceLayout(1, o_layout)) < count)[:, None]
        stride = heads * (2 * HALF)
        base = out + first * stride + column
        _store(base, stride, gl.where(live, o1 / total, 0.0), written, HALF)
        _store(base + HALF, stride, gl.where(live, o2 / total, 0.0), written, HALF)
        _end(ready)


@gluon.jit(do_not_specialize=["positions"])
def _backward(g_desc, q_desc, k_desc, v_desc, grad_q, grad_k, grad_v, place, turns, positions, heads, scale,
              HALF: gl.constexpr, ROPE: gl.constexpr, INTERLEAVED: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_desc.dtype)
    head = gl.program_id(0) % heads
    first, count, written, start = _locate(place, gl.program_id(0) // heads)
    if written > 0:
        q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        v = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        g = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        row, column = first.to(gl.int32), head * (2 * HALF)
        mbarrier.expect(ready.index(0), 4 * q_desc.block_type.nbytes)
        _fetch(q_desc, q, row, column, ready.index(0), HALF)
        _fetch(k_desc, k, row, column, ready.index(0), HALF)
        mbarrier.expect(ready.index(1), 4 * q_desc.block_type.nbytes)
        _fetch(g_desc, g, row, column, ready.index(1), HALF)
        _fetch(v_desc, v, row, column, ready.index(1), HALF)
        words = 0, 0
        if ROPE:
            words = _load_words(turns, start, positions, HALF, INTERLEAVED)
        mbarrier.wait(ready.index(0), 0)
        if count < 64:
            _clear(q, count, HALF)
            _clear(k, count, HALF)
        if ROPE:
            _rotate(q, words, HALF, INTERLEAVED)
            _rotate(k, words, HALF, INTERLEAVED)
        fence_async_shared()
        p, total = _softmax(_scores(q, k, s_layout), count, scale * LOG2E, s_layout)
        p = p / total[:, None]
        mbarrier.wait(ready.index(1), 0)
        if count < 64:
            _clear(g, count, HALF)
            _clear(v, count, HALF)
            fence_async_shared()
        dp = _scores(g, v, s_layout)
        ds = p * (dp - gl.sum(p * dp, 1)[:, None]) * scale
        p_tile = gl.allocate_shared_memory(q_desc.dtype, [64, 64], p_shared, p.to(q_desc.dtype))
        ds_tile = gl.allocate_shared_memory(q_desc.dtype, [64, 64], p_shared, ds.to(q_desc.dtype))
        fence_async_shared()
        d1, d2 = _product(p_tile.permute((1, 0)), g, HALF, d_layout)
        p_tile._keep_alive()
        stride = heads * (6 * HALF)  # the gradients of q, k and v lie side by side
        base = first * stride + column
        _store_gradient(grad_v + base, stride, d1, d2, words, written, HALF, False, INTERLEAVED)
        d1, d2 = _product(ds_tile, k, HALF, d_layout)
        _store_gradient(grad_q + base, stride, d1, d2, words, written, HALF, ROPE, INTERLEAVED)
        d1, d2 = _product(ds_tile.permute((1, 0)), q, HALF, d_layout)
        ds_tile._keep_alive()
        _store_gradient(grad_k + base, stride, d1, d2, words, written, HALF, ROPE, INTERLEAVED)
        _end(ready)


def _one_by_one(x: Tensor) -> Tensor:
    """x `[T, H, D]` with heads side by side in rows that TMA can address."""
    row, head, element = x.stride()
    fits = element == 1 and head == x.shape[2] and row % 8 == 0 and row < 1 << 25 and aligned(x)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor) -> TensorDescriptor:
    """Tiles of 64 half rows of one head of `x` `[T, H, D]`, seen as `[T, H * D]`."""
    rows, heads, dim = x.shape
    return described(_tiles(x.stride(0), heads, dim, x.dtype), x, shape=[rows, heads * dim])


@functools.cache
def _tiles(row: int, heads: int, dim: int, dtype: torch.dtype) -> TensorDescriptor:
    half, kind = dim // 2, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([64, half], kind)
    return TensorDescriptor(torch.empty(0, dtype=dtype), [64, heads * dim], [row, 1], [64, half], layout)


def _launch(kernel, inputs: list[Tensor], outputs: list[Tensor], offsets: Tensor, cos: Tensor, sin: Tensor,
            max_length: int, scale: float, interleaved: bool, by_row: bool, registers: int | None) -> None:
    rows, heads, dim = outputs[0].shape
    if not portable.any_tile(outputs, offsets):
        return
    place, turns, rope = portable.prepare(rows, offsets, cos, sin, max_length, 64, by_row)
    descriptors = [_descriptor(_one_by_one(x)) for x in inputs]
    launch(kernel, (place.shape[0] * heads, 1, 1), kind_of(outputs[0], turns, facts=(heads,)),
           (*descriptors, *outputs, place, turns, turns.shape[0], heads, scale),
           (dim // 2, rope, rope and interleaved), stages=1, registers=registers)


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                  block: int, scale: float, interleaved: bool, by_row: bool) -> Tensor:
    """See `reference.block_forward`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward, [q, k, v], [out], offsets, cos, sin, max_length, scale, interleaved, by_row, None)
    return out


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                   max_length: int, block: int, scale: float, interleaved: bool,
                   by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.block_backward`."""
    outs = side_by_side(q, q.shape[0])
    _launch(_backward, [grad, q, k, v], list(outs), offsets, cos, sin, max_length, scale, interleaved, by_row,
            REGISTERS[q.shape[2]])
    return outs
