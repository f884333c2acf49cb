"""Jagged flash attention backward for Hopper in Gluon: five products a tile, one kernel, equal bits in every run.

An item is 128 rows of keys of one sample and head; blocks take items from a queue. A producer warp streams tiles of Q,
dO and of the row statistics past them by TMA; eight warps form scores transposed, so that P and dS are left operands
from registers for dv and dk. dS goes through shared memory once, for dq. dk and dv leave through the places of k and v.

Several blocks add to a tile of dq, in turn: see `gluon_sm90_turns`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.jfa import triton as portable
from opengem.kernels.jfa.gluon_sm90 import LOG2E, get, matrix, plain, ragged, takes
from opengem.kernels.jfa.gluon_sm90_turns import (
    ENDS,
    FRESH,
    LAST,
    STARTS,
    TURNS,
    add_share,
    await_turns,
    produce,
    store,
    sum_so_far,
    tell,
    visible,
)
from opengem.kernels.jfa.reference import Options
from opengem.kernels.launch import aligned, launch, multiprocessors

KEYS = 128  # key rows of a block
QUERIES = 64  # query rows of a tile
STAGES = {64: 4, 128: 2}  # tiles in flight, by head dimension
FIELDS = 6
SPREAD = 256  # samples whose key tiles alternate where queries are few; their sums of dq stay in the L2
SORTED = gl.constexpr(2048)  # samples; sorting more takes longer than it saves


# ---- before the products -----------------------------------------------------------------------------------------


@triton.jit
def _find(offsets_ptr, slot, total, batch, BLOCK: tl.constexpr):
    """(sample, its first row, its length, number of this tile within it); sample == batch means the unused rows."""
    lane = tl.arange(0, 128)
    low = 0
    size = batch + 1
    while size > 1:
        step = (size + 127) // 128
        sample = low + lane * step
        start = tl.load(offsets_ptr + tl.minimum(sample, batch)).to(tl.int32) // BLOCK + sample
        before = tl.sum(((start <= slot) & (lane * step < size)).to(tl.int32), 0) - 1
        low += before * step
        size = tl.minimum(step, size - before * step)
    begin = tl.load(offsets_ptr + low).to(tl.int32)
    end = tl.load(offsets_ptr + low + 1, mask=low < batch, other=0).to(tl.int32)
    end = tl.where(low < batch, end, total)
    return low, begin, end - begin, slot - (begin // BLOCK + low)


@triton.jit
def _place(offsets_ptr, sample, place, slots, batch, SPREAD: tl.constexpr, BLOCK: tl.constexpr):
    """Where tile `place` of a sample stands if SPREAD samples take turns: first tiles, second tiles, and so on."""
    group = sample // SPREAD * SPREAD
    other = group + tl.arange(0, SPREAD)
    begin = tl.load(offsets_ptr + other, mask=other <= batch, other=0).to(tl.int32) // BLOCK + other
    end = tl.load(offsets_ptr + other + 1, mask=other < batch, other=0).to(tl.int32) // BLOCK + other + 1
    count = tl.where(other < batch, end, slots) - begin
    count = tl.where(other <= batch, count, 0)
    before = tl.minimum(count, place + tl.where(other < sample, 1, 0))
    first = tl.load(offsets_ptr + group).to(tl.int32) // BLOCK + group
    return first + tl.sum(before, 0)


@triton.jit
def _tiles_of_longer(
    q_offsets_ptr, kv_offsets_ptr, work, sample, batch, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Key tiles of the samples with more work than `work`, or as much and a smaller number than `sample`."""
    found = tl.zeros([256], tl.int32)
    for start in range(0, batch, 256):
        other = start + tl.arange(0, 256)
        real = other < batch
        q, k = q_offsets_ptr + other, kv_offsets_ptr + other
        m = tl.load(q + 1, mask=real, other=0) - tl.load(q, mask=real, other=0)
        n = tl.load(k + 1, mask=real, other=0) - tl.load(k, mask=real, other=0)
        tiles = ((n + KEYS - 1) // KEYS).to(tl.int32)
        theirs = ((m + QUERIES - 1) // QUERIES).to(tl.int32) * tiles
        found += tl.where(real & ((theirs > work) | ((theirs == work) & (other < sample))), tiles, 0)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["total_q", "total_kv", "batch", "q_slots", "kv_slots", "left", "right"])
def _prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, stats_ptr, counters_ptr, records_ptr, q_offsets_ptr,
    kv_offsets_ptr, dout_stride, dkv_stride, total_q, total_kv, batch, q_slots, kv_slots, left, right,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPREAD: tl.constexpr,
):
    """A program writes the record of a key tile, or the statistics of a query tile and head, and its counter.

    Gradients that the main kernel does not write, of rows that see nothing, get zeros here.
    """
    program = tl.program_id(0)
    if program < kv_slots:
        if program == 0:
            tl.store(counters_ptr + HEADS * q_slots, 0)
        _record(
            dk_ptr, dv_ptr, records_ptr, q_offsets_ptr, kv_offsets_ptr, program, dkv_stride, total_kv, batch, kv_slots,
            left, right, HAS_LEFT, HAS_RIGHT, KV_HEADS, HEAD_DIM, QUERIES, KEYS, SPREAD)
    else:
        slot = (program - kv_slots) // HEADS
        head = program - kv_slots - slot * HEADS
        sample, q_begin, m, place = _find(q_offsets_ptr, slot, total_q, batch, QUERIES)
        first = place * QUERIES
        if first < m:
            step = tl.arange(0, QUERIES)
            live = first + step < m
            row = (q_begin + first + step).to(tl.int64)
            column = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            dense = row[:, None] * (HEADS * HEAD_DIM) + column
            out = tl.load(out_ptr + dense, mask=live[:, None], other=0.0)
            dout = tl.load(dout_ptr + row[:, None] * dout_stride + column, mask=live[:, None], other=0.0)
            delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
            at = head.to(tl.int64) * total_q + row
            if HAS_DLSE:
                delta -= tl.load(dlse_ptr + at, mask=live, other=0.0)
            lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"))
            dead = lse == float("-inf")
            zeros = tl.zeros([QUERIES, HEAD_DIM], dq_ptr.dtype.element_ty)
            tl.store(dq_ptr + dense, zeros, mask=(live & dead)[:, None])
            tile = (head * q_slots + slot).to(tl.int64)
            base = stats_ptr + tile * (2 * QUERIES) + step
            tl.store(base, tl.where(dead, float("inf"), lse * 1.4426950408889634))
            tl.store(base + QUERIES, tl.where(dead, 0.0, delta))
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _record(
    dk_ptr, dv_ptr, records_ptr, q_offsets_ptr, kv_offsets_ptr, slot, dkv_stride, total_kv, batch, slots, left,
    right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SPREAD: tl.constexpr,
):
    sample, k_begin, n, place = _find(kv_offsets_ptr, slot, total_kv, batch, KEYS)
    q_begin = tl.load(q_offsets_ptr + sample).to(tl.int32)
    q_end = tl.load(q_offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int32)
    m = tl.where(sample < batch, q_end - q_begin, 0)
    tiles = (n + KEYS - 1) // KEYS
    tile = tiles - 1 - place  # the last keys first: see _rank
    to = slot
    real = slot >= 0
    if SPREAD > 0:
        to = _place(kv_offsets_ptr, sample, place, slots, batch, SPREAD, KEYS)
    else:
        if batch <= SORTED:  # the samples with most work first
            real = (tile >= 0) & (sample < batch)
            all_tiles = _tiles_of_longer(q_offsets_ptr, kv_offsets_ptr, -1, 0, batch, QUERIES, KEYS)
            tl.store(records_ptr + 2 * slots + slot, -1, mask=slot >= all_tiles)
            work = (m + QUERIES - 1) // QUERIES * tiles
            to = place + _tiles_of_longer(q_offsets_ptr, kv_offsets_ptr, work, sample, batch, QUERIES, KEYS)
    tl.store(records_ptr + to, k_begin, mask=real)
    tl.store(records_ptr + slots + to, n, mask=real)
    tl.store(records_ptr + 2 * slots + to, tile, mask=real)
    tl.store(records_ptr + 3 * slots + to, q_begin, mask=real)
    tl.store(records_ptr + 4 * slots + to, m, mask=real)
    tl.store(records_ptr + 5 * slots + to, q_begin // QUERIES + sample, mask=real)
    unseen = m == 0
    if HAS_LEFT:
        unseen = unseen | (tile * KEYS + KEYS - 1 + left - (n - m) < 0)
    if HAS_RIGHT:
        unseen = unseen | (tile * KEYS - right - (n - m) >= (m + QUERIES - 1) // QUERIES * QUERIES)
    if unseen & (tile >= 0):
        j = tile * KEYS + tl.arange(0, KEYS)
        at = (k_begin + j).to(tl.int64)[:, None] * dkv_stride + tl.arange(0, HEAD_DIM)[None, :]
        zeros = tl.zeros([KEYS, HEAD_DIM], dk_ptr.dtype.element_ty)
        for head in range(KV_HEADS):
            tl.store(dk_ptr + at + head * HEAD_DIM, zeros, mask=(j < n)[:, None])
            tl.store(dv_ptr + at + head * HEAD_DIM, zeros, mask=(j < n)[:, None])


# ---- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    dq_ptr, scratch_ptr, k_ring, v_ring, q_ring, do_ring, stats_ring, steps, ds_tile, notes, kv_full, staged, q_full,
    do_full, empty, turn, done, q_stride, scale, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    # Under a causal mask all blocks of a sample end on one query tile, each waiting for the one before: there a sum is
    # announced before the block waits for its next item.
    EAGER: gl.constexpr = HAS_RIGHT and not HAS_LEFT
    dtype: gl.constexpr = k_ring.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, QUERIES, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [QUERIES // 16, 128 // QUERIES], [16, HEAD_DIM * QUERIES // 128, 16])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale2 = scale * LOG2E
    steps.store(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)))
    count = 0
    kv_count = 0
    zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, o_layout)
    dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, o_layout)
    s_next, flags = _next_scores(k_ring, q_ring, notes, q_full, kv_full, 0, 0, zero, HEAD_DIM, QUERIES, KEYS, STAGES)
    while flags >= 0:
        at = count % STAGES
        kv = kv_count % 2
        k = matrix(k_ring.index(kv), KEYS, HEAD_DIM)
        v = matrix(v_ring.index(kv), KEYS, HEAD_DIM)
        q = matrix(q_ring.index(at), QUERIES, HEAD_DIM)
        dout = matrix(do_ring.index(at), QUERIES, HEAD_DIM)
        stats = stats_ring.index(at)._reinterpret(gl.float32, [2, QUERIES], flat)
        mbarrier.wait(do_full.index(at), (count // STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        dp_next = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse2 = stats.index(0).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * scale2 - lse2[None, :])
        p = visible(p, flags, steps, notes, at, left, right, HAS_LEFT, HAS_RIGHT, QUERIES)
        weights = gl.convert_layout(p.to(dtype), p_layout)
        goes_on = flags & STARTS == 0
        dv_next = warpgroup_mma(weights, dout, dv, use_acc=goes_on, is_async=True)
        delta = stats.index(1).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(1, deps=[dp_next])
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_tile.store(ds)
        fence_async_shared()
        share = gl.zeros([QUERIES, HEAD_DIM], gl.float32, dq_layout)
        dq_next = warpgroup_mma(ds_tile.permute((1, 0)), k, share, use_acc=False, is_async=True)
        ds = gl.convert_layout(ds, p_layout)
        dk_next = warpgroup_mma(ds, q, dk, use_acc=goes_on, is_async=True)
        address = scratch_ptr.to(gl.int64) + get(notes, 8 * at + 1, 8).to(gl.int64) * (4 * QUERIES * HEAD_DIM)
        mode = gl.where(flags & LAST != 0, 2, gl.where(flags & FRESH != 0, 0, 1))
        turn_at = count % TURNS
        mbarrier.wait(turn.index(turn_at), (count // TURNS) & 1)
        share, dv, weights = warpgroup_mma_wait(1, deps=[dq_next, dv_next, weights])
        add_share(address, share, mode, QUERIES * HEAD_DIM // 256)
        if EAGER:
            mbarrier.arrive(done.index(turn_at), count=1)
        if flags & LAST != 0:
            if flags & FRESH == 0:
                share += sum_so_far(address, share, QUERIES * HEAD_DIM // 256)
            store(dq_ptr, share * scale, get(notes, 8 * at + 4, 8), get(notes, 8 * at + 5, 8),
                   get(notes, 8 * at + 6, 8) * HEAD_DIM, q_stride, QUERIES, HEAD_DIM)
        s_next, flags_ahead = _next_scores(
            k_ring, q_ring, notes, q_full, kv_full, count + 1, kv_count + gl.where(flags & ENDS != 0, 1, 0), s,
            HEAD_DIM, QUERIES, KEYS, STAGES)
        dk, ds = warpgroup_mma_wait(1, deps=[dk_next, ds])
        if EAGER:
            mbarrier.arrive(empty.index(at), count=1)
        else:
            mbarrier.arrive(done.index(turn_at), count=1)  # `tell` frees the place of the tile
        if flags & ENDS != 0:
            k.store((dk * scale).to(dtype))
            v.store(dv.to(dtype))
            fence_async_shared()
            mbarrier.arrive(staged.index(kv), count=1)
            kv_count += 1
        count += 1
        flags = flags_ahead
    warpgroup_mma_wait(0, deps=[s_next, dk, dv])


@gluon.jit
def _next_scores(
    k_ring, q_ring, notes, q_full, kv_full, count, kv_count, s, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr):
    """(scores of tile `count`, in flight; its flags): they run beside the end of the tile before."""
    at = count % STAGES
    mbarrier.wait(q_full.index(at), (count // STAGES) & 1)
    flags = get(notes, 8 * at, 8)
    mbarrier.wait(kv_full.index(kv_count % 2), (kv_count // 2) & 1, pred=flags >= 0)
    q = matrix(q_ring.index(at), QUERIES, HEAD_DIM)
    s = warpgroup_mma(
        matrix(k_ring.index(kv_count % 2), KEYS, HEAD_DIM), q.permute((1, 0)), s, use_acc=False, is_async=True)
    return s, flags


@gluon.jit(do_not_specialize=["slots", "items", "q_slots", "limit", "left", "right"])
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_ptr, scratch_ptr, counters_ptr, records_ptr,
    slots, items, q_slots, q_stride, scale, limit, left, right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    DEALT: gl.constexpr):
    """DEALT: blocks take every so-many-th item instead of the next one of a queue, which they know ahead."""
    dtype: gl.constexpr = q_desc.dtype
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, HEAD_DIM], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, HEAD_DIM], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, HEAD_DIM], do_desc.layout)
    stats_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, QUERIES], stats_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    ds_tile = gl.allocate_shared_memory(dtype, [KEYS, QUERIES], ds_layout)
    notes = gl.allocate_shared_memory(gl.int32, [8 * STAGES, 1], numbers)
    steps = gl.allocate_shared_memory(gl.int32, [KEYS], numbers)
    places = gl.allocate_shared_memory(gl.int32, [8, 1], numbers)
    claims = gl.allocate_shared_memory(gl.int32, [2, 1], numbers)
    orders = gl.allocate_shared_memory(gl.int32, [2 * TURNS, 1], numbers)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    claimed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(TURNS):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(staged.index(i), count=1)
        if not DEALT:  # a barrier that nobody waits for shares its memory with a tile, and would be written over it
            mbarrier.init(claimed.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
    gl.warp_specialize([
        (_consume, (dq_ptr, scratch_ptr, k_ring, v_ring, q_ring, do_ring, stats_ring, steps, ds_tile, notes, kv_full,
                    staged, q_full, do_full, empty, turn, done, q_stride, scale, left, right, HAS_LEFT, HAS_RIGHT,
                    HEAD_DIM, QUERIES, KEYS, STAGES)),
        (produce, (q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, records_ptr, k_ring, v_ring, q_ring,
                   do_ring, stats_ring, notes, places, claims, kv_full, staged, q_full, do_full, empty, claimed, taken,
                   slots, items, q_slots, limit, left, right, GROUP, HAS_LEFT, HAS_RIGHT, HEAD_DIM, QUERIES, KEYS,
                   STAGES, DEALT)),
        (await_turns, (counters_ptr, records_ptr, claims, orders, turn, done, told, claimed, taken, slots, items,
                       q_slots, limit, left, right, GROUP, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS, DEALT)),
        (tell, (counters_ptr, orders, done, told, empty, STAGES, HAS_LEFT or not HAS_RIGHT)),
    ], [1, 1, 1], [24, 24, 24])


# ---- launch --------------------------------------------------------------------------------------------------------


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, max_q: int, max_kv: int, options: Options,
    room: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.backward`, for what `takes` says; everything else goes to the portable kernels.

    Few queries against many keys (pooling): the blocks of a sample would wait for their turns longer than they work.
    So SPREAD samples take turns in the order of items, and a block finds the one before it done. Its items are short
    and alike, so they are dealt out ahead, and the next keys can be fetched in time.
    room: where dk and dv go, with one stride of rows and heads side by side (default: new tensors).
    """
    dout = dout if dout.stride(2) == 1 and dout.stride(1) == dout.shape[2] else dout.contiguous()
    if not (takes(q, k, v, bias) and takes(dout, k, v, bias)):
        return portable.backward(
            dout, dlse, q, k, v, out, lse, q_offsets, kv_offsets, bias, max_q, max_kv, options)
    total, heads, dim = q.shape
    total_kv, kv_heads, _ = k.shape
    batch = q_offsets.shape[0] - 1
    dlse = None if dlse is None else dlse.contiguous()
    dq, *made = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, *(() if room else (k, v))))
    dk, dv = room or made
    q_slots, slots = total // QUERIES + batch + 1, total_kv // KEYS + batch + 1
    stats = torch.empty((heads * q_slots * 2, QUERIES), dtype=torch.float32, device=q.device)
    scratch = torch.empty(heads * q_slots * QUERIES * dim, dtype=torch.float32, device=q.device)
    counters = torch.empty(heads * q_slots + 1, dtype=torch.int32, device=q.device)
    records = torch.empty(FIELDS * slots, dtype=torch.int32, device=q.device)
    strides = dout.stride(0), dk.stride(0)
    spread = SPREAD if 2 * max_q < max_kv else 0
    key = None
    if aligned(q_offsets, kv_offsets, out, lse, *(() if dlse is None else (dlse,))):
        key = q.device, q.dtype, q_offsets.dtype, kv_offsets.dtype, heads
    launch(
        _prepare_kernel, (slots + q_slots * heads, 1, 1), key and (key, *strides),
        (out, dout, lse, dlse, dq, dk, dv, stats, counters, records, q_offsets, kv_offsets, *strides, total, total_kv,
         batch, q_slots, slots, options.left, options.right),
        (dlse is not None, options.left >= 0, options.right >= 0, heads, kv_heads, dim, QUERIES, KEYS, spread))
    items = slots * kv_heads
    launch(
        _backward_kernel, (min(multiprocessors(q.device), items), 1, 1), key,
        (ragged(q, QUERIES), ragged(k, KEYS), ragged(v, KEYS), ragged(dout, QUERIES), plain(stats, 2),
         ragged(dk, KEYS), ragged(dv, KEYS), dq, scratch, counters, records, slots, items, q_slots, heads * dim,
         options.scale, 0 if spread else multiprocessors(q.device) // 2, options.left, options.right),
        (heads // kv_heads, options.left >= 0, options.right >= 0, dim, QUERIES, KEYS, STAGES[dim], spread > 0), 8)
    return dq, dk, dv, q.new_empty(0)
