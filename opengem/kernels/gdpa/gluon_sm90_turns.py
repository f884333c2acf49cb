"""GDPA backward for Hopper (sm_90): one kernel, five products a tile, equal bits in every run. Read `gluon_sm90.py` first.

An item is 128 keys of a sample and head; blocks take items from a queue. A producer warp streams tiles of 64 queries
and of their output gradients past them. Eight warps form scores transposed (S^T = K Q^T, dP^T = V dO^T), so that P^T and
dS^T are left operands from registers for dv and dk; dS^T goes through shared memory once, for dq = dS K. The scores of
the next tile, perhaps of the next item, are multiplied beside the end of this one.

dq is summed in fp32 scratch by the blocks of a sample, in turn: they pass over its query tiles from staggered starts, and
each tile has a counter of the blocks that have added to it. One warp waits for the block's turn, another announces that
the block is done. The first block of a tile stores, the next ones add, the last one adds and writes dq. The order
follows from the shape of the sample, so the bits do not depend on timing. Scratch holds a tile in the order of the
registers: a thread reads and writes 16 bytes at a time.

No block waits for one that may never run: items are taken in order, and turns wait for earlier items, or (at most half
as many key tiles in a sample as there are multiprocessors) for blocks of one sample that all fit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.gdpa import triton as shared
from opengem.kernels.gdpa.gluon_sm90 import BOUND, TANH_A, TANH_AB, _load_rows, _tanh, _zero_rows
from opengem.kernels.gdpa.gluon_sm90_backward import QUAD
from opengem.kernels.jfa.gluon_sm90 import get, put
from opengem.kernels.jfa.gluon_sm90_backward import _add_share, _sum_so_far

KEYS = gl.constexpr(128)
QUERIES = gl.constexpr(64)
STARTS = gl.constexpr(1)  # the first tile of an item, its last
ENDS = gl.constexpr(2)
FRESH = gl.constexpr(4)  # the first block, the last block to add to this tile of dq
LAST = gl.constexpr(8)
NOTES = gl.constexpr(8)  # numbers that come with a tile
act_both = gluon.jit(shared.act_both.fn)


@gluon.jit
def weigh(s, scale, ACT: gl.constexpr, FOLD: gl.constexpr):
    """(value, slope) of scores s before scaling; with FOLD both still lack their factor scale / 2 and 1 / 2."""
    if FOLD:
        if ACT == "silu":
            bend = 0.5 * scale
            t = _tanh(s * bend, True)
        else:
            a = TANH_A * scale
            b = TANH_AB * scale * scale * scale
            u = s * s
            t = _tanh(s * (a + b * u), True)
            bend = a + 3.0 * b * u
        value = s + s * t
        return value, (1.0 + t) + (value - value * t) * bend  # s (1 - t^2) = value (1 - t)
    else:
        return act_both(s * scale, ACT, True)


# ---- who works on what, and when -----------------------------------------------------------------------------------


@gluon.jit
def _plan(item, tiles_ptr, places_ptr, count, limit):
    """(head, first key row, keys left, key tile, key tiles, first query row, queries, slot, query tiles, begin)."""
    head = item // count
    entry = item - head * count
    k_row = gl.load(tiles_ptr + 4 * entry)
    left = gl.load(tiles_ptr + 4 * entry + 1)
    q_begin = gl.load(tiles_ptr + 4 * entry + 2)
    m = gl.load(tiles_ptr + 4 * entry + 3)
    tile = gl.load(places_ptr + 2 * entry)
    slot = gl.load(places_ptr + 2 * entry + 1)
    owners = gl.maximum(tile + (left + KEYS - 1) // KEYS, 1)
    tiles = gl.maximum((m + QUERIES - 1) // QUERIES, 1)
    begin = gl.where(owners <= limit, tile * tiles // owners, 0)
    return head, k_row, left, tile, owners, q_begin, m, slot, tiles, begin


@gluon.jit
def _rank(query_tile, tile, owners, tiles, limit):
    """How many blocks add to the query tile before the owner of key tile `tile` does.

    From the last that has started by then downwards, then from the very last; in order where they do not all fit.
    """
    started = ((query_tile + 1) * owners + tiles - 1) // tiles
    wrapped = gl.where(tile < started, started - 1 - tile, started + owners - 1 - tile)
    return gl.where(owners <= limit, wrapped, tile)


# ---- the warps beside the products ---------------------------------------------------------------------------------


@gluon.jit
def _write_back(kv, dk_desc, dv_desc, k_ring, v_ring, places):
    """dk and dv, which have taken the places of k and v, to global memory."""
    end = get(places, 4 * kv, 1)
    row = get(places, 4 * kv + 1, 1)
    column = get(places, 4 * kv + 2, 1)
    tma.async_copy_shared_to_global(dk_desc, [BOUND, end, row, column], k_ring.index(kv))
    tma.async_copy_shared_to_global(dv_desc, [BOUND, end, row, column], v_ring.index(kv))
    tma.store_wait(0)


@gluon.jit
def _produce(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, tiles_ptr, places_ptr, k_ring, v_ring, q_ring, g_ring, notes,
    places, claims, kv_full, staged, q_full, q_empty, g_full, g_empty, claimed, taken, entries, items, q_slots, limit,
    q_head, g_head, k_head, v_head, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr):
    count = 0
    kv_count = 0
    item = gl.program_id(0)
    while item < items:
        head, k_row, left, tile, owners, q_begin, m, slot, tiles, begin = _plan(
            item, tiles_ptr, places_ptr, entries, limit)
        kv = kv_count % 2
        mbarrier.wait(staged.index(kv), ((kv_count // 2) & 1) ^ 1)
        if kv_count >= 2:
            _write_back(kv, dk_desc, dv_desc, k_ring, v_ring, places)
        put(places, 4 * kv, k_row + left)
        put(places, 4 * kv + 1, BOUND - left)
        put(places, 4 * kv + 2, head * D)
        mbarrier.expect(kv_full.index(kv), 2 * k_desc.block_type.nbytes)
        _load_rows(k_desc, head * k_head, k_row, left, 0, kv_full.index(kv), k_ring.index(kv))
        _load_rows(v_desc, head * v_head, k_row, left, 0, kv_full.index(kv), v_ring.index(kv))
        for trip in range(tiles):
            query_tile = begin + trip
            query_tile = gl.where(query_tile >= tiles, query_tile - tiles, query_tile)
            rank = _rank(query_tile, tile, owners, tiles, limit)
            flags = gl.where(trip == 0, STARTS, 0) + gl.where(trip == tiles - 1, ENDS, 0)
            flags += gl.where(rank == 0, FRESH, 0) + gl.where(rank == owners - 1, LAST, 0)
            at = count % Q_STAGES
            mbarrier.wait(q_empty.index(at), ((count // Q_STAGES) & 1) ^ 1)
            put(notes, NOTES * at, flags)
            put(notes, NOTES * at + 1, head * q_slots + slot + query_tile)
            put(notes, NOTES * at + 2, q_begin + query_tile * QUERIES)
            put(notes, NOTES * at + 3, m - query_tile * QUERIES)
            put(notes, NOTES * at + 4, head)
            mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes)
            _load_rows(q_desc, head * q_head, q_begin, m, query_tile * QUERIES, q_full.index(at), q_ring.index(at))
            at = count % G_STAGES
            mbarrier.wait(g_empty.index(at), ((count // G_STAGES) & 1) ^ 1)
            mbarrier.expect(g_full.index(at), g_desc.block_type.nbytes)
            _load_rows(g_desc, head * g_head, q_begin, m, query_tile * QUERIES, g_full.index(at), g_ring.index(at))
            count += 1
        at = kv_count % 2
        mbarrier.wait(claimed.index(at), (kv_count // 2) & 1)
        item = get(claims, at, 1)
        mbarrier.arrive(taken.index(at), count=1)
        kv_count += 1
    at = count % Q_STAGES
    mbarrier.wait(q_empty.index(at), ((count // Q_STAGES) & 1) ^ 1)
    put(notes, NOTES * at, -1)
    mbarrier.arrive(q_full.index(at), count=1)
    left_over = gl.minimum(kv_count, 2)
    for back in range(left_over):
        block = kv_count - left_over + back
        mbarrier.wait(staged.index(block % 2), (block // 2) & 1)
        _write_back(block % 2, dk_desc, dv_desc, k_ring, v_ring, places)


@gluon.jit
def _await_turns(
    counters_ptr, tiles_ptr, places_ptr, claims, orders, turn, done, told, claimed, taken, entries, items, q_slots,
    limit, H):
    count = 0
    claim_count = 0
    item = gl.program_id(0)
    while item < items:
        head, k_row, left, tile, owners, q_begin, m, slot, tiles, begin = _plan(
            item, tiles_ptr, places_ptr, entries, limit)
        base = head * q_slots + slot
        for trip in range(tiles):
            query_tile = begin + trip
            query_tile = gl.where(query_tile >= tiles, query_tile - tiles, query_tile)
            rank = _rank(query_tile, tile, owners, tiles, limit)
            at = count % 2
            mbarrier.wait(told.index(at), ((count // 2) & 1) ^ 1)
            gl.inline_asm_elementwise(
                """{
                .reg .pred behind;
                .reg .s32 value;
                again:
                ld.acquire.gpu.global.s32 value, [$1];
                setp.lt.s32 behind, value, $2;
                @behind bra again;
                mov.s32 $0, value;
                }""", "=r,l,r", [(counters_ptr + base + query_tile).to(gl.int64), rank], gl.int32, is_pure=False,
                pack=1)
            put(orders, 2 * at, base + query_tile)
            put(orders, 2 * at + 1, rank + 1)
            mbarrier.arrive(turn.index(at), count=1)
            count += 1
        # No turn is left to wait for, so taking an item cannot keep others from theirs.
        item = gl.atomic_add(counters_ptr + H * q_slots, 1, sem="relaxed") + gl.num_programs(0)
        at = claim_count % 2
        mbarrier.wait(taken.index(at), ((claim_count // 2) & 1) ^ 1)
        put(claims, at, item)
        mbarrier.arrive(claimed.index(at), count=1)
        claim_count += 1
    at = count % 2
    mbarrier.wait(told.index(at), ((count // 2) & 1) ^ 1)
    put(orders, 2 * at, -1)
    mbarrier.arrive(done.index(at), count=1)


@gluon.jit
def _tell(counters_ptr, orders, done, told):
    mbarrier.wait(done.index(0), 0)
    place = get(orders, 0, 1)
    count = 0
    while place >= 0:
        at = count % 2
        gl.inline_asm_elementwise(
            """{
            fence.acq_rel.gpu;
            st.release.gpu.global.s32 [$1], $2;
            mov.s32 $0, $2;
            }""", "=r,l,r", [(counters_ptr + place).to(gl.int64), get(orders, 2 * at + 1, 1)], gl.int32, is_pure=False,
            pack=1)
        mbarrier.arrive(told.index(at), count=1)
        count += 1
        at = count % 2
        mbarrier.wait(done.index(at), (count // 2) & 1)
        place = get(orders, 2 * at, 1)


# ---- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _runs(x):
    """A [64, 128] product in 16 bit as [256, 32] quarter rows in which a thread holds 8 neighbours: the four lanes that
    share a row exchange what they hold of four runs."""
    x = gl.reshape(x, [4, 2, 8, 2, 2, 4, 4, 2])  # warp, row of two, lane row; warpgroup, half, run, lane column, column
    in_order: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [16, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[32, 0], [64, 0], [128, 0]], block_bases=[], shape=[256, 32])
    x = gl.convert_layout(gl.reshape(gl.permute(x, (3, 0, 1, 4, 2, 6, 5, 7)), [256, 32]), in_order)
    return gl.inline_asm_elementwise(QUAD, "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=x.dtype, is_pure=False, pack=8)


@gluon.jit
def _store(base, tile, rows, stride):
    """The first `rows` rows of a [64, 128] product to memory, 16 bytes a thread."""
    runs = _runs(tile.to(base.dtype.element_ty))
    run = gl.arange(0, 256, gl.SliceLayout(1, runs.type.layout))[:, None]
    column = run // 128 * 64 + run // 8 % 2 * 32 + gl.arange(0, 32, gl.SliceLayout(0, runs.type.layout))[None, :]
    row = run // 32 % 4 * 16 + run // 16 % 2 * 8 + run % 8
    gl.store(base + row * stride + column, runs, mask=row < rows)


@gluon.jit
def _consume(
    dq_ptr, scratch_ptr, k_ring, v_ring, q_ring, g_ring, ds_tile, notes, kv_full, staged, q_full, q_empty, g_full,
    g_empty, turn, done, q_stride, scale, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, SUM: gl.constexpr):
    dtype: gl.constexpr = k_ring.dtype
    VALUES: gl.constexpr = QUERIES * D // 256
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, QUERIES, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    kv_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, D], dtype)
    factor = 0.5 * scale if FOLD else scale
    v_factor = 0.5 * scale if FOLD else 1.0
    count = 0
    kv_count = 0
    zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    dk = gl.zeros([KEYS, D], gl.float32, o_layout)
    dv = gl.zeros([KEYS, D], gl.float32, o_layout)
    ds = gl.convert_layout(zero.to(dtype), p_layout)
    mbarrier.wait(q_full.index(0), 0)
    flags = get(notes, 0, 8)
    mbarrier.wait(kv_full.index(0), 0, pred=flags >= 0)
    s_next = warpgroup_mma(
        k_ring.index(0)._reinterpret(dtype, [KEYS, D], kv_shared),
        q_ring.index(0)._reinterpret(dtype, [QUERIES, D], q_shared).permute((1, 0)), zero, use_acc=False, is_async=True)
    while flags >= 0:
        at = count % Q_STAGES
        g_at = count % G_STAGES
        kv = kv_count % 2
        k = k_ring.index(kv)._reinterpret(dtype, [KEYS, D], kv_shared)
        v = v_ring.index(kv)._reinterpret(dtype, [KEYS, D], kv_shared)
        q = q_ring.index(at)._reinterpret(dtype, [QUERIES, D], q_shared)
        g = g_ring.index(g_at)._reinterpret(dtype, [QUERIES, D], q_shared)
        mbarrier.wait(g_full.index(g_at), (count // G_STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        dp_next = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        value, slope = weigh(s, scale, ACT, FOLD)
        weights = gl.convert_layout(value.to(dtype), p_layout)
        goes_on = flags & STARTS == 0
        dv_next = warpgroup_mma(weights, g, dv, use_acc=goes_on, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_next])
        ds = (dp * slope).to(dtype)
        ds_tile.store(ds)
        fence_async_shared()
        share = gl.zeros([QUERIES, D], gl.float32, dq_layout)
        dq_next = warpgroup_mma(ds_tile.permute((1, 0)), k, share, use_acc=False, is_async=True)
        ds = gl.convert_layout(ds, p_layout)
        ahead = (count + 1) % Q_STAGES
        dk_next = warpgroup_mma(ds, q, dk, use_acc=goes_on, is_async=True)
        share, dv, weights = warpgroup_mma_wait(1, deps=[dq_next, dv_next, weights])
        # The scores of the next tile, perhaps of the next item, run beside the end of this one.
        mbarrier.wait(q_full.index(ahead), ((count + 1) // Q_STAGES) & 1)
        flags_ahead = get(notes, NOTES * ahead, 8)
        kv_ahead = kv_count + gl.where(flags & ENDS != 0, 1, 0)
        mbarrier.wait(kv_full.index(kv_ahead % 2), (kv_ahead // 2) & 1, pred=flags_ahead >= 0)
        k_ahead = k_ring.index(kv_ahead % 2)._reinterpret(dtype, [KEYS, D], kv_shared)
        q_ahead = q_ring.index(ahead)._reinterpret(dtype, [QUERIES, D], q_shared)
        s_ahead = warpgroup_mma(k_ahead, q_ahead.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.arrive(g_empty.index(g_at), count=1)
        turn_at = count % 2
        mbarrier.wait(turn.index(turn_at), (count // 2) & 1)
        if SUM:
            place = get(notes, NOTES * at + 1, 8)
            address = scratch_ptr.to(gl.int64) + place.to(gl.int64) * (4 * QUERIES * D)
            mode = gl.where(flags & LAST != 0, 2, gl.where(flags & FRESH != 0, 0, 1))
            _add_share(address, share, mode, VALUES)
        if flags & LAST != 0:
            if SUM:
                if flags & FRESH == 0:
                    share += _sum_so_far(address, share, VALUES)
            corner = dq_ptr + get(notes, NOTES * at + 2, 8).to(gl.int64) * q_stride + get(notes, NOTES * at + 4, 8) * D
            _store(corner, share * factor, get(notes, NOTES * at + 3, 8), q_stride)
        mbarrier.arrive(done.index(turn_at), count=1)
        dk, ds = warpgroup_mma_wait(1, deps=[dk_next, ds])
        mbarrier.arrive(q_empty.index(at), count=1)
        s_next = s_ahead
        if flags & ENDS != 0:
            k.store((dk * factor).to(dtype))
            v.store((dv * v_factor).to(dtype))
            fence_async_shared()
            mbarrier.arrive(staged.index(kv), count=1)
            kv_count += 1
        count += 1
        flags = flags_ahead
    warpgroup_mma_wait(0, deps=[s_next, dk, dv])


@gluon.jit(do_not_specialize=["batch", "list_start", "places_start", "q_elements", "kv_elements", "q_slots", "limit"])
def backward_in_turns(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, dq, dk, dv, scratch, counters, q_offsets, kv_offsets, schedule,
    batch, list_start, places_start, q_elements, kv_elements, q_slots, limit, scale, H, q_head, g_head, k_head, v_head,
    ACT: gl.constexpr, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr, FOLD: gl.constexpr,
    SUM: gl.constexpr):
    """dq [Tq, H, D], dk and dv [Tkv, H, D] contiguous; scratch fp32 [H * q_slots, 64 * D]; counters int32, zeros
    [H * q_slots + 1]. One block a multiprocessor; 8 warps."""
    _zero_rows(dq, gl.load(q_offsets + batch).to(gl.int64) * H * D, q_elements, 2048)
    kv_end = gl.load(kv_offsets + batch).to(gl.int64) * H * D
    _zero_rows(dk, kv_end, kv_elements, 2048)
    _zero_rows(dv, kv_end, kv_elements, 2048)
    entries = gl.load(schedule + 1)
    items = entries * H
    tiles_ptr = schedule + list_start
    places_ptr = schedule + places_start
    dtype: gl.constexpr = q_desc.dtype
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, QUERIES, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(dtype, [G_STAGES, 1, 1, QUERIES, D], g_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    ds_tile = gl.allocate_shared_memory(dtype, [KEYS, QUERIES], ds_layout)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * Q_STAGES, 1], numbers)
    places = gl.allocate_shared_memory(gl.int32, [8, 1], numbers)
    claims = gl.allocate_shared_memory(gl.int32, [2, 1], numbers)
    orders = gl.allocate_shared_memory(gl.int32, [4, 1], numbers)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    claimed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(G_STAGES):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(staged.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(claimed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    gl.warp_specialize([
        (_consume, (dq, scratch, k_ring, v_ring, q_ring, g_ring, ds_tile, notes, kv_full, staged, q_full, q_empty,
                    g_full, g_empty, turn, done, H * D, scale, D, Q_STAGES, G_STAGES, ACT, FOLD, SUM)),
        (_produce, (q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, tiles_ptr, places_ptr, k_ring, v_ring, q_ring,
                    g_ring, notes, places, claims, kv_full, staged, q_full, q_empty, g_full, g_empty, claimed, taken,
                    entries, items, q_slots, limit, q_head, g_head, k_head, v_head, D, Q_STAGES, G_STAGES)),
        (_await_turns, (counters, tiles_ptr, places_ptr, claims, orders, turn, done, told, claimed, taken, entries,
                        items, q_slots, limit, H)),
        (_tell, (counters, orders, done, told)),
    ], [1, 1, 1], [24, 24, 24])
