"""Jagged flash attention backward for Hopper in Gluon: two persistent, warp-specialised kernels without atomics.

Both have one shape. An item is 128 rows that own their result; two tensors of those rows stay in shared memory while a
producer warp streams tiles of two tensors of the other side past them. Rows of queries own dq (Q and dO stay, K and V
pass); rows of keys own dk and dv (K and V stay, Q and dO pass, scores are formed transposed so that both products take
their left operand from registers). Each result is summed by one warpgroup in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.jfa import triton as portable
from opengem.kernels.jfa.gluon_sm90 import (
    LOG2E,
    _clear_rows,
    _descriptor,
    _key,
    _schedule,
    _tiles,
    takes,
)
from opengem.kernels.jfa.reference import Options
from opengem.kernels.launch import aligned, launch, multiprocessors

STREAM = 64  # rows of a passing tile
STAGES = {64: 4, 128: 3}  # passing tiles in flight, by head dimension


@triton.jit(do_not_specialize=["rows"])
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, dout_stride, rows, HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """delta = sum(out * dout) - dlse for BLOCK rows of one head; `out` is dense, heads of `dout` stand side by side."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    live = row < rows
    out = tl.load(out_ptr + row[:, None] * (tl.num_programs(1) * HEAD_DIM) + column, mask=live[:, None], other=0.0)
    dout = tl.load(dout_ptr + row[:, None] * dout_stride + column, mask=live[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + head * rows + row, mask=live, other=0.0)
    tl.store(delta_ptr + head * rows + row, delta, mask=live)


# ---- producer --------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr, stay0, stay1,
    pass0, pass1, stay_full, stay_empty, full, empty, slots, items, total_q, scale, before, after, GROUP: gl.constexpr,
    KEYS_OWN: gl.constexpr, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr,
    STREAM: gl.constexpr, STAGES: gl.constexpr,
):
    count = 0
    done = 0
    for item in tl.range(gl.program_id(0), items, gl.num_programs(0), disable_licm=True):
        head = item // slots
        slot = item - head * slots
        rows = gl.load(records_ptr + slots + slot)
        if rows > 0:
            own_row = gl.load(records_ptr + slot)
            position = gl.load(records_ptr + 2 * slots + slot)
            pass_row = gl.load(records_ptr + 3 * slots + slot)
            n = gl.load(records_ptr + 4 * slots + slot)
            last, first, full_first, full_end = _tiles(position, rows, n, before, after, STREAM, HAS_BEFORE, HAS_AFTER)
            mbarrier.wait(stay_empty, (done & 1) ^ 1)
            mbarrier.expect(stay_full, 4 * stay0_desc.block_type.nbytes)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    stay0_desc, [own_row + 64 * half, head * HEAD_DIM], stay_full, stay0.index(half))
                tma.async_copy_global_to_shared(
                    stay1_desc, [own_row + 64 * half, head * HEAD_DIM], stay_full, stay1.index(half))
            done += 1
            for turn in range(GROUP if KEYS_OWN else 1):
                column = (head * GROUP + turn if KEYS_OWN else head // GROUP) * HEAD_DIM
                for back in range(last - first + 1):
                    row = pass_row + (last - back) * STREAM
                    at = count % STAGES
                    mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(at), 2 * pass0_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(pass0_desc, [row, column], full.index(at), pass0.index(at))
                    tma.async_copy_global_to_shared(pass1_desc, [row, column], full.index(at), pass1.index(at))
                    count += 1


# ---- dq --------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_tiles(
    tile, tiles, count, dq, q, dout, k_ring, v_ring, full, empty, lse2, delta, position, step, n, scale2, before, after,
    MASK: gl.constexpr, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr,
    STREAM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):
    for back in range(tiles):
        at = count % STAGES
        k, v = k_ring.index(at), v_ring.index(at)
        mbarrier.wait(full.index(at), (count // STAGES) & 1)
        zero = gl.zeros([64, STREAM], gl.float32, S_LAYOUT)
        s_next = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_next = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        p = gl.exp2(s * scale2 - lse2[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        ds = p * (dp - delta[:, None])
        if MASK:
            start = (tile - back) * STREAM
            key = start + step
            visible = (key < n)[None, :]
            if HAS_BEFORE:
                visible = visible & (key[None, :] >= position[:, None] - before)
            if HAS_AFTER:
                visible = visible & (key[None, :] <= position[:, None] + after)
            ds = gl.where(visible, ds, 0.0)
            if n - start < STREAM:
                _clear_rows(k, n - start, STREAM, HEAD_DIM)
        ds = gl.convert_layout(ds.to(k_ring.dtype), P_LAYOUT)
        dq_next = warpgroup_mma(ds, k, dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=[dq_next, ds])
        mbarrier.arrive(empty.index(at), count=1)
        count += 1
    return count, dq


@gluon.jit
def _store(base, tile, row, rows, column, stride, HALF: gl.constexpr, HEAD_DIM: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    own = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    address = (row + own).to(gl.int64)[:, None] * stride + columns[None, :]
    value = gl.convert_layout(tile.to(base.dtype.element_ty), layout)
    gl.store(base + address, value, mask=(own < rows)[:, None])


@gluon.jit
def _consume_dq(
    lse_ptr, delta_ptr, out_ptr, records_ptr, stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty, slots,
    items, total_q, scale, before, after, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr,
    STREAM: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    own = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    step = gl.arange(0, STREAM, gl.SliceLayout(0, s_layout))
    stride = items // slots * HEAD_DIM
    q, dout = stay0.index(HALF), stay1.index(HALF)
    scale2 = scale * LOG2E
    count = 0
    done = 0
    for item in tl.range(gl.program_id(0), items, gl.num_programs(0), disable_licm=True):
        head = item // slots
        slot = item - head * slots
        rows = gl.load(records_ptr + slots + slot)
        if rows > 0:
            row = gl.load(records_ptr + slot)
            position = gl.load(records_ptr + 2 * slots + slot)
            n = gl.load(records_ptr + 4 * slots + slot)
            last, first, full_first, full_end = _tiles(position, rows, n, before, after, STREAM, HAS_BEFORE, HAS_AFTER)
            at_row = head.to(gl.int64) * total_q + row + own
            lse2 = gl.load(lse_ptr + at_row, mask=own < rows, other=float("inf")) * LOG2E
            lse2 = gl.where(lse2 == float("-inf"), float("inf"), lse2)
            delta = gl.load(delta_ptr + at_row, mask=own < rows, other=0.0)
            dq = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            mbarrier.wait(stay_full, done & 1)
            edge = gl.maximum(gl.minimum(full_end, last), first)
            count, dq = _dq_tiles(
                last, last - edge + 1, count, dq, q, dout, pass0, pass1, full, empty, lse2, delta, position + own, step,
                n, scale2, before, after, True, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, s_layout, p_layout)
            low = gl.minimum(full_first, edge)
            count, dq = _dq_tiles(
                edge - 1, edge - low, count, dq, q, dout, pass0, pass1, full, empty, lse2, delta, position + own, step,
                n, scale2, before, after, False, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, s_layout, p_layout)
            if HAS_BEFORE:
                count, dq = _dq_tiles(
                    low - 1, low - first, count, dq, q, dout, pass0, pass1, full, empty, lse2, delta, position + own,
                    step, n, scale2, before, after, True, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, s_layout,
                    p_layout)
            mbarrier.arrive(stay_empty, count=1)
            done += 1
            _store(out_ptr, dq * scale, row, rows, head * HEAD_DIM, stride, HALF, HEAD_DIM)


# ---- dk and dv -------------------------------------------------------------------------------------------------


@gluon.jit
def _dkdv_tiles(
    tile, tiles, count, dk, dv, k, v, q_ring, do_ring, full, empty, lse_ptr, delta_ptr, position, step, m, scale2,
    before, after, MASK: gl.constexpr, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr,
    STREAM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):
    for back in range(tiles):
        at = count % STAGES
        q, dout = q_ring.index(at), do_ring.index(at)
        start = (tile - back) * STREAM
        query = start + step
        if MASK:
            live = query < m
            lse2 = gl.load(lse_ptr + query, mask=live, other=float("inf")) * LOG2E
            lse2 = gl.where(lse2 == float("-inf"), float("inf"), lse2)
        else:
            lse2 = gl.load(lse_ptr + query) * LOG2E
        mbarrier.wait(full.index(at), (count // STAGES) & 1)
        if MASK:  # noqa: SIM102 (a constant and a value of the kernel do not combine)
            if m - start < STREAM:
                _clear_rows(q, m - start, STREAM, HEAD_DIM)
                _clear_rows(dout, m - start, STREAM, HEAD_DIM)
        zero = gl.zeros([64, STREAM], gl.float32, S_LAYOUT)
        s_next = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_next = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        p = gl.exp2(s * scale2 - lse2[None, :])
        if MASK:
            visible = live[None, :]
            if HAS_BEFORE:
                visible = visible & (query[None, :] >= position[:, None] - before)
            if HAS_AFTER:
                visible = visible & (query[None, :] <= position[:, None] + after)
            p = gl.where(visible, p, 0.0)
        weights = gl.convert_layout(p.to(q_ring.dtype), P_LAYOUT)
        dv_next = warpgroup_mma(weights, dout, dv, is_async=True)
        delta = gl.load(delta_ptr + query, mask=live, other=0.0) if MASK else gl.load(delta_ptr + query)
        dp = warpgroup_mma_wait(1, deps=[dp_next])
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(q_ring.dtype), P_LAYOUT)
        dk_next = warpgroup_mma(ds, q, dk, is_async=True)
        dk, dv, ds, weights = warpgroup_mma_wait(0, deps=[dk_next, dv_next, ds, weights])
        mbarrier.arrive(empty.index(at), count=1)
        count += 1
    return count, dk, dv


@gluon.jit
def _consume_dkdv(
    lse_ptr, delta_ptr, dk_ptr, dv_ptr, records_ptr, stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty,
    slots, items, total_q, scale, before, after, GROUP: gl.constexpr, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr,
    HEAD_DIM: gl.constexpr, STREAM: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    own = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    step = gl.arange(0, STREAM, gl.SliceLayout(0, s_layout))
    stride = items // slots * HEAD_DIM
    k, v = stay0.index(HALF), stay1.index(HALF)
    scale2 = scale * LOG2E
    count = 0
    done = 0
    for item in tl.range(gl.program_id(0), items, gl.num_programs(0), disable_licm=True):
        head = item // slots
        slot = item - head * slots
        rows = gl.load(records_ptr + slots + slot)
        if rows > 0:
            row = gl.load(records_ptr + slot)
            position = gl.load(records_ptr + 2 * slots + slot)
            q_row = gl.load(records_ptr + 3 * slots + slot)
            m = gl.load(records_ptr + 4 * slots + slot)
            last, first, full_first, full_end = _tiles(position, rows, m, before, after, STREAM, HAS_BEFORE, HAS_AFTER)
            edge = gl.maximum(gl.minimum(full_end, last), first)
            low = gl.minimum(full_first, edge)
            dk = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            dv = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            mbarrier.wait(stay_full, done & 1)
            for turn in range(GROUP):
                at_row = (head * GROUP + turn).to(gl.int64) * total_q + q_row
                count, dk, dv = _dkdv_tiles(
                    last, last - edge + 1, count, dk, dv, k, v, pass0, pass1, full, empty, lse_ptr + at_row,
                    delta_ptr + at_row, position + own, step, m, scale2, before, after, True, HAS_BEFORE, HAS_AFTER,
                    HEAD_DIM, STREAM, STAGES, s_layout, p_layout)
                count, dk, dv = _dkdv_tiles(
                    edge - 1, edge - low, count, dk, dv, k, v, pass0, pass1, full, empty, lse_ptr + at_row,
                    delta_ptr + at_row, position + own, step, m, scale2, before, after, False, HAS_BEFORE, HAS_AFTER,
                    HEAD_DIM, STREAM, STAGES, s_layout, p_layout)
                if HAS_BEFORE:
                    count, dk, dv = _dkdv_tiles(
                        low - 1, low - first, count, dk, dv, k, v, pass0, pass1, full, empty, lse_ptr + at_row,
                        delta_ptr + at_row, position + own, step, m, scale2, before, after, True, HAS_BEFORE, HAS_AFTER,
                        HEAD_DIM, STREAM, STAGES, s_layout, p_layout)
            mbarrier.arrive(stay_empty, count=1)
            done += 1
            # Rows behind the last offset have no queries, but their v may hold NaN, and p = 0 does not hide it.
            dk = gl.where(m > 0, dk * scale, 0.0)
            _store(dk_ptr, dk, row, rows, head * HEAD_DIM, stride, HALF, HEAD_DIM)
            _store(dv_ptr, dv, row, rows, head * HEAD_DIM, stride, HALF, HEAD_DIM)


# ---- kernel and launch -----------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr, stay0, stay1,
    pass0, pass1, stay_full, stay_empty, full, empty, slots, items, total_q, scale, before, after, GROUP: gl.constexpr,
    KEYS_OWN: gl.constexpr, HAS_BEFORE: gl.constexpr, HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr,
    STREAM: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):
    if KEYS_OWN:
        _consume_dkdv(
            lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr, stay0, stay1, pass0, pass1, stay_full, stay_empty,
            full, empty, slots, items, total_q, scale, before, after, GROUP, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM,
            STAGES, HALF)
    else:
        _consume_dq(
            lse_ptr, delta_ptr, out0_ptr, records_ptr, stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty,
            slots, items, total_q, scale, before, after, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, HALF)


@gluon.jit(do_not_specialize=["slots", "items", "total_q", "before", "after"])
def _backward_kernel(
    stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr, slots, items,
    total_q, scale, before, after, GROUP: gl.constexpr, KEYS_OWN: gl.constexpr, HAS_BEFORE: gl.constexpr,
    HAS_AFTER: gl.constexpr, HEAD_DIM: gl.constexpr, STREAM: gl.constexpr, STAGES: gl.constexpr,
):
    stay0 = gl.allocate_shared_memory(stay0_desc.dtype, [2, 64, HEAD_DIM], stay0_desc.layout)
    stay1 = gl.allocate_shared_memory(stay0_desc.dtype, [2, 64, HEAD_DIM], stay0_desc.layout)
    pass0 = gl.allocate_shared_memory(stay0_desc.dtype, [STAGES, STREAM, HEAD_DIM], pass0_desc.layout)
    pass1 = gl.allocate_shared_memory(stay0_desc.dtype, [STAGES, STREAM, HEAD_DIM], pass0_desc.layout)
    stay_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    stay_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(stay_full, count=1)
    mbarrier.init(stay_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize([
        (_consume, (stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr,
                    stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty, slots, items, total_q, scale,
                    before, after, GROUP, KEYS_OWN, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, 0)),
        (_consume, (stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr,
                    stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty, slots, items, total_q, scale,
                    before, after, GROUP, KEYS_OWN, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES, 1)),
        (_produce, (stay0_desc, stay1_desc, pass0_desc, pass1_desc, lse_ptr, delta_ptr, out0_ptr, out1_ptr, records_ptr,
                    stay0, stay1, pass0, pass1, stay_full, stay_empty, full, empty, slots, items, total_q, scale,
                    before, after, GROUP, KEYS_OWN, HAS_BEFORE, HAS_AFTER, HEAD_DIM, STREAM, STAGES)),
    ], [4, 1], [240, 24])


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.backward`, for what `takes` says; everything else goes to the portable kernels."""
    dout = dout if dout.stride(2) == 1 and dout.stride(1) == dout.shape[2] else dout.contiguous()
    if not (takes(q, k, v, bias) and takes(dout, k, v, bias)):
        return portable.backward(
            dout, dlse, q, k, v, out, lse, q_offsets, kv_offsets, bias, max_q, max_kv, options)
    total, heads, dim = q.shape
    dlse = None if dlse is None else dlse.contiguous()
    delta = torch.empty_like(lse)
    key = _key(q, q_offsets, kv_offsets) if aligned(out, lse, *(() if dlse is None else (dlse,))) else None
    launch(
        _delta_kernel, ((total + 63) // 64, heads, 1), key and (key, dout.stride(0)),
        (out, dout, dlse, delta, dout.stride(0), total), (dlse is not None, dim, 64))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    left, right = options.left, options.right
    group = heads // k.shape[1]
    _launch(q, dout, k, v, lse, delta, dq, dq, q_offsets, kv_offsets, key, options.scale, left, right, group, False)
    _launch(k, v, q, dout, lse, delta, dk, dv, kv_offsets, q_offsets, key, options.scale, right, left, group, True)
    return dq, dk, dv, q.new_empty(0)


def _launch(stay0, stay1, pass0, pass1, lse, delta, out0, out1, offsets, pass_offsets, key, scale, before, after, group,
            keys_own) -> None:
    total, heads, dim = stay0.shape
    records, slots = _schedule(total, offsets, pass_offsets, key)
    launch(
        _backward_kernel, (min(multiprocessors(stay0.device), slots * heads), 1, 1), key,
        (_descriptor(stay0, 64), _descriptor(stay1, 64), _descriptor(pass0, STREAM), _descriptor(pass1, STREAM), lse,
         delta, out0, out1, records, slots, slots * heads, lse.shape[1], scale, before, after),
        (group, keys_own, before >= 0, after >= 0, dim, STREAM, STAGES[dim]))
