"""Block attention on Hopper in Gluon: TMA loads, one tile and head a program."""
from __future__ import annotations
import functools
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.block.triton import _map, _turns
from opengem.kernels.launch import kind_of, launch

LOG2E = gl.constexpr(1.4426950408889634)
DEAD = gl.constexpr(-1e30)


@gluon.jit
def _fetch(desc, tiles, row, column, ready, HALF: gl.constexpr, base=0):
    tma.async_copy_global_to_shared(desc, [row, column], ready, tiles.index(base))
    tma.async_copy_global_to_shared(desc, [row, column + HALF], ready, tiles.index(base + 1))


@gluon.jit
def _clear(tiles, count, HALF: gl.constexpr, base=0):
    """Zeros in the rows of other samples: 0 * NaN is not 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    live = (gl.arange(0, 64, gl.SliceLayout(1, layout)) < count)[:, None]
    for half in gl.static_range(2):
        values = tiles.index(base + half).load(layout)
        tiles.index(base + half).store(gl.where(live, values, gl.zeros_like(values)))


@gluon.jit
def _words(turns, start, positions, HALF: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    row = gl.minimum(row, (positions - 1 - start).to(gl.int32))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    return gl.load(turns + start * HALF + (row[:, None] * HALF + column[None, :]), eviction_policy="evict_last")


@gluon.jit
def _angles(word):
    cos = (word & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True)
    sin = (word >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
    return cos.to(gl.float32), sin.to(gl.float32)


@gluon.jit
def _rotate(tiles, word, HALF: gl.constexpr, base=0):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    first = tiles.index(base).load(layout).to(gl.float32)
    second = tiles.index(base + 1).load(layout).to(gl.float32)
    cos, sin = _angles(word)
    tiles.index(base).store((first * cos - second * sin).to(tiles.dtype))
    tiles.index(base + 1).store((second * cos + first * sin).to(tiles.dtype))


@gluon.jit
def _store(base, stride, tile, count, written, HALF: gl.constexpr, CLEAR: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    value = gl.convert_layout(tile.to(base.dtype.element_ty), layout)
    if CLEAR:
        value = gl.where((row < count)[:, None], value, gl.zeros_like(value))
    gl.store(base + (row[:, None] * stride + column[None, :]), value, mask=(row < written)[:, None])


@gluon.jit
def _scores(q, k, S_LAYOUT: gl.constexpr, base=0):
    s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q.index(base), k.index(base).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q.index(base + 1), k.index(base + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _softmax(s, count, scale2, S_LAYOUT: gl.constexpr):
    key = gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
    s = gl.where((key < count)[None, :], s * scale2, DEAD)
    p = gl.exp2(s - gl.max(s, 1)[:, None])
    return p, gl.sum(p, 1)


@gluon.jit(do_not_specialize=["positions"])
def _forward(q_desc, k_desc, v_desc, out, place, turns, positions, heads, scale, HALF: gl.constexpr,
             ROPE: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    tile = gl.program_id(0) // heads
    head = gl.program_id(0) - tile * heads
    first = gl.load(place + 2 * tile)
    packed = gl.load(place + 2 * tile + 1)
    count = (packed & 0xFF).to(gl.int32)
    written = (packed >> 8 & 0xFF).to(gl.int32)
    start = packed >> 16
    if written > 0:
        q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        v = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        row = first.to(gl.int32)
        column = head * (2 * HALF)
        mbarrier.expect(ready.index(0), 4 * q_desc.block_type.nbytes)
        _fetch(q_desc, q, row, column, ready.index(0), HALF)
        _fetch(k_desc, k, row, column, ready.index(0), HALF)
        mbarrier.expect(ready.index(1), 2 * q_desc.block_type.nbytes)
        _fetch(v_desc, v, row, column, ready.index(1), HALF)
        if ROPE:
            word = _words(turns, start, positions, HALF)
        mbarrier.wait(ready.index(0), 0)
        if ROPE:
            _rotate(q, word, HALF)
            _rotate(k, word, HALF)
            fence_async_shared()
        s = _scores(q, k, s_layout)
        p, total = _softmax(s, count, scale * LOG2E, s_layout)
        mbarrier.wait(ready.index(1), 0)
        if count < 64:
            _clear(v, count, HALF)
            fence_async_shared()
        p = gl.convert_layout(p.to(q_desc.dtype), gl.DotOperandLayout(0, o_layout, 2))
        zero = gl.zeros([64, HALF], gl.float32, o_layout)
        o1 = warpgroup_mma(p, v.index(0), zero, use_acc=False, is_async=True)
        o2 = warpgroup_mma(p, v.index(1), zero, use_acc=False, is_async=True)
        o1, o2, p = warpgroup_mma_wait(0, deps=[o1, o2, p])
        total = gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))
        stride = heads * (2 * HALF)
        base = out + first * stride + column
        _store(base, stride, o1 * total[:, None], count, written, HALF, True)
        _store(base + HALF, stride, o2 * total[:, None], count, written, HALF, True)


@gluon.jit
def _fetch_head(q_desc, k_desc, v_desc, q, k, v, ready, row, head, slot, HALF: gl.constexpr):
    mbarrier.expect(ready.index(2 * slot), 4 * q_desc.block_type.nbytes)
    _fetch(q_desc, q, row, head * (2 * HALF), ready.index(2 * slot), HALF, 2 * slot)
    _fetch(k_desc, k, row, head * (2 * HALF), ready.index(2 * slot), HALF, 2 * slot)
    mbarrier.expect(ready.index(2 * slot + 1), 2 * q_desc.block_type.nbytes)
    _fetch(v_desc, v, row, head * (2 * HALF), ready.index(2 * slot + 1), HALF, 2 * slot)


@gluon.jit(do_not_specialize=["positions"])
def _forward_heads(q_desc, k_desc, v_desc, out, place, turns, positions, heads, scale, HALF: gl.constexpr,
                   ROPE: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    tile = gl.program_id(0)
    first = gl.load(place + 2 * tile)
    packed = gl.load(place + 2 * tile + 1)
    count = (packed & 0xFF).to(gl.int32)
    written = (packed >> 8 & 0xFF).to(gl.int32)
    start = packed >> 16
    if written > 0:
        q = gl.allocate_shared_memory(q_desc.dtype, [4, 64, HALF], q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, [4, 64, HALF], q_desc.layout)
        v = gl.allocate_shared_memory(q_desc.dtype, [4, 64, HALF], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(4):
            mbarrier.init(ready.index(i), count=1)
        row = first.to(gl.int32)
        _fetch_head(q_desc, k_desc, v_desc, q, k, v, ready, row, 0, 0, HALF)
        if ROPE:
            word = _words(turns, start, positions, HALF)
        stride = heads * (2 * HALF)
        for head in tl.range(0, heads, disable_licm=True):
            at = head & 1
            phase = (head >> 1) & 1
            if head + 1 < heads:
                fence_async_shared()
                gl.thread_barrier()
                _fetch_head(q_desc, k_desc, v_desc, q, k, v, ready, row, head + 1, at ^ 1, HALF)
            mbarrier.wait(ready.index(2 * at), phase)
            if ROPE:
                _rotate(q, word, HALF, 2 * at)
                _rotate(k, word, HALF, 2 * at)
                fence_async_shared()
            s = _scores(q, k, s_layout, 2 * at)
            p, total = _softmax(s, count, scale * LOG2E, s_layout)
            mbarrier.wait(ready.index(2 * at + 1), phase)
            if count < 64:
                _clear(v, count, HALF, 2 * at)
                fence_async_shared()
            p = gl.convert_layout(p.to(q_desc.dtype), gl.DotOperandLayout(0, o_layout, 2))
            zero = gl.zeros([64, HALF], gl.float32, o_layout)
            o1 = warpgroup_mma(p, v.index(2 * at), zero, use_acc=False, is_async=True)
            o2 = warpgroup_mma(p, v.index(2 * at + 1), zero, use_acc=False, is_async=True)
            o1, o2, p = warpgroup_mma_wait(0, deps=[o1, o2, p])
            total = gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))
            base = out + first * stride + head * (2 * HALF)
            _store(base, stride, o1 * total[:, None], count, written, HALF, True)
            _store(base + HALF, stride, o2 * total[:, None], count, written, HALF, True)


@gluon.jit
def _store_pair(base, stride, d1, d2, count, written, turn, HALF: gl.constexpr, ROPE: gl.constexpr,
                D_LAYOUT: gl.constexpr):
    if ROPE:
        cos, sin = _angles(turn.load(D_LAYOUT))
        d1, d2 = d1 * cos + d2 * sin, d2 * cos - d1 * sin
    _store(base, stride, d1, count, written, HALF, False)
    _store(base + HALF, stride, d2, count, written, HALF, False)


@gluon.jit(do_not_specialize=["positions"])
def _backward(g_desc, q_desc, k_desc, v_desc, grad_q, grad_k, grad_v, place, turns, positions, heads, scale,
              HALF: gl.constexpr, ROPE: gl.constexpr, OVERLAP: gl.constexpr, RELOAD: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_desc.dtype)
    turn_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    tile = gl.program_id(0) // heads
    head = gl.program_id(0) - tile * heads
    first = gl.load(place + 2 * tile)
    packed = gl.load(place + 2 * tile + 1)
    count = (packed & 0xFF).to(gl.int32)
    written = (packed >> 8 & 0xFF).to(gl.int32)
    start = packed >> 16
    if written > 0:
        q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        v = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        g = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HALF], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        row = first.to(gl.int32)
        column = head * (2 * HALF)
        mbarrier.expect(ready.index(0), 4 * q_desc.block_type.nbytes)
        _fetch(q_desc, q, row, column, ready.index(0), HALF)
        _fetch(k_desc, k, row, column, ready.index(0), HALF)
        mbarrier.expect(ready.index(1), 4 * q_desc.block_type.nbytes)
        _fetch(g_desc, g, row, column, ready.index(1), HALF)
        _fetch(v_desc, v, row, column, ready.index(1), HALF)
        if ROPE:
            word = _words(turns, start, positions, HALF)
        mbarrier.wait(ready.index(0), 0)
        if count < 64:
            _clear(q, count, HALF)
            _clear(k, count, HALF)
            if not ROPE:
                fence_async_shared()
        if ROPE:
            _rotate(q, word, HALF)
            _rotate(k, word, HALF)
            fence_async_shared()
        s = _scores(q, k, s_layout)
        p, total = _softmax(s, count, scale * LOG2E, s_layout)
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
        zero = gl.zeros([64, HALF], gl.float32, d_layout)
        d1 = warpgroup_mma(p_tile.permute((1, 0)), g.index(0), zero, use_acc=False, is_async=True)
        d2 = warpgroup_mma(p_tile.permute((1, 0)), g.index(1), zero, use_acc=False, is_async=True)
        if ROPE and RELOAD:
            word = _words(turns, start, positions, HALF)
        d1, d2 = warpgroup_mma_wait(0, deps=[d1, d2])
        p_tile._keep_alive()
        g._keep_alive()
        stride = heads * (2 * HALF)
        base = first * stride + column
        turn = ds_tile
        if ROPE and not RELOAD:
            turn = gl.allocate_shared_memory(gl.int32, [64, HALF], turn_shared, word)
        if OVERLAP:
            e1 = warpgroup_mma(ds_tile, k.index(0), zero, use_acc=False, is_async=True)
            e2 = warpgroup_mma(ds_tile, k.index(1), zero, use_acc=False, is_async=True)
            _store_pair(grad_v + base, stride, d1, d2, count, written, turn, HALF, False, d_layout)
        else:
            _store_pair(grad_v + base, stride, d1, d2, count, written, turn, HALF, False, d_layout)
            e1 = warpgroup_mma(ds_tile, k.index(0), zero, use_acc=False, is_async=True)
            e2 = warpgroup_mma(ds_tile, k.index(1), zero, use_acc=False, is_async=True)
        if ROPE and RELOAD:
            turn = gl.allocate_shared_memory(gl.int32, [64, HALF], turn_shared, word)
        e1, e2 = warpgroup_mma_wait(0, deps=[e1, e2])
        k._keep_alive()
        if OVERLAP:
            d1 = warpgroup_mma(ds_tile.permute((1, 0)), q.index(0), zero, use_acc=False, is_async=True)
            d2 = warpgroup_mma(ds_tile.permute((1, 0)), q.index(1), zero, use_acc=False, is_async=True)
            _store_pair(grad_q + base, stride, e1, e2, count, written, turn, HALF, ROPE, d_layout)
        else:
            _store_pair(grad_q + base, stride, e1, e2, count, written, turn, HALF, ROPE, d_layout)
            d1 = warpgroup_mma(ds_tile.permute((1, 0)), q.index(0), zero, use_acc=False, is_async=True)
            d2 = warpgroup_mma(ds_tile.permute((1, 0)), q.index(1), zero, use_acc=False, is_async=True)
        d1, d2 = warpgroup_mma_wait(0, deps=[d1, d2])
        q._keep_alive()
        ds_tile._keep_alive()
        _store_pair(grad_k + base, stride, d1, d2, count, written, turn, HALF, ROPE, d_layout)


@functools.cache
def _layout(half: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([64, half], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _descriptor(x: Tensor) -> TensorDescriptor:
    half = x.shape[2] // 2
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [64, half],
                            _layout(half, x.dtype))


REGISTERS = {"forward": 128, "backward": 168}
HEADS = False
MODE = {"forward": (), "backward": (False, False)}


def _launch(kernel, direction, inputs, outputs, offsets, cos, sin, max_length, scale):
    rows, heads, dim = outputs[0].shape
    batch = offsets.shape[0] - 1
    rope = cos.shape[0] > 0
    turns = _turns(cos, sin, min(cos.shape[0], max(1, max_length))) if rope else cos
    tiles = rows // 64 + batch
    place = torch.empty((tiles, 2), dtype=torch.int64, device=offsets.device)
    launch(_map, (batch, 1, 1), kind_of(offsets), (offsets, place, rows, batch, tiles), (64, 32), warps=1)
    if HEADS and direction == "forward":
        kernel = _forward_heads
    launch(kernel, (tiles if kernel is _forward_heads else tiles * heads, 1, 1), kind_of(*inputs, facts=(heads,)),
           (*map(_descriptor, inputs), *outputs, place, turns, turns.shape[0], heads, scale), (dim // 2, rope, *MODE[direction]),
           stages=1, registers=REGISTERS[direction])


def block_forward(q, k, v, offsets, cos, sin, max_length, block, scale, interleaved):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward, "forward", [q, k, v], [out], offsets, cos, sin, max_length, scale)
    return out


def block_backward(grad, q, k, v, offsets, cos, sin, max_length, block, scale, interleaved):
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    _launch(_backward, "backward", [grad, q, k, v], outs, offsets, cos, sin, max_length, scale)
    return outs[0], outs[1], outs[2]
