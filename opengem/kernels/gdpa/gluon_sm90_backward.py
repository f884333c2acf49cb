"""GDPA backward for Hopper (sm_90) in one kernel: five products a tile, equal bits. Read `gluon_sm90.py` first.

A block works on 128 keys of a sample and head at a time. Two consumer warpgroups keep 64 of them each, with the sums of
dk and dv in registers, while a producer warp streams tiles of 64 queries and of their output gradients past them.
S^T = K Q^T and dP^T = V dO^T are computed directly, so P^T and dS^T enter dv and dk from registers. dS^T also goes
through shared memory: each warpgroup makes one half of the columns of dq = dS K, summed over all 128 keys. The scores
of the next tile, perhaps of the next keys, are multiplied beside the end of this one. What a tile is comes with it in
shared memory (`notes`).

dq has a share from every 128 keys. They are summed in fp32 scratch that lies in the order in which threads hold a
product, 16 bytes each. Who adds them:
- OWNER: a block owns a sample and head, and passes over its queries once for each 128 keys. Nobody waits.
- Otherwise an item is 128 keys, taken from a queue, and the blocks of a sample add in turn. They start staggered; each
  tile has a counter of those that have added. Two more warps wait for the turn, let TMA add the share, and count. The
  order follows from the shape of the sample alone, so the bits do not depend on timing.
The first share is stored, the last one is added to what the others left, and dq written.

No block waits for one that may never run: items are taken in order, and turns wait for earlier items, or (at most half
as many key tiles in a sample as there are multiprocessors) for blocks of one sample that all fit. A block takes its
next item when the queue has left its sample.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.gdpa import triton as shared
from opengem.kernels.gdpa.gluon_sm90 import (
    NOTES,
    ROWS,
    TANH_A,
    TANH_AB,
    _ahead,
    _dealt,
    _rounds,
    _tanh,
    _zero_rows,
)
from opengem.kernels.jfa.gluon_sm90 import get, load_rows, put
from opengem.kernels.jfa.gluon_sm90_turns import await_count

KEYS = gl.constexpr(128)  # of a block, at a time; ROWS are keys of a warpgroup, and queries of a tile
STARTS = gl.constexpr(1)  # the first tile of 128 keys, their last
ENDS = gl.constexpr(2)
FRESH = gl.constexpr(4)  # the first share of this tile of dq, the last one
LAST = gl.constexpr(8)
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
    tiles = gl.maximum((m + ROWS - 1) // ROWS, 1)
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


@builtin
def add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """The numbers in `src` added to those in memory, as `tma.async_copy_shared_to_global` stores them."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _load_halves(desc, column, row, left, barrier, ring, at):
    mbarrier.expect(barrier, 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        load_rows(desc, row, left, half * ROWS, column, barrier, ring.index(2 * at + half))


@gluon.jit
def _produce(
    q_desc, g_desc, k_desc, v_desc, tiles_ptr, places_ptr, k_ring, v_ring, q_ring, g_ring, notes, claims, k_full,
    k_empty, v_full, v_empty, q_full, q_empty, g_full, g_empty, claimed, taken, entries, items, queue, q_slots, limit,
    H, q_head, g_head, k_head, v_head, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, OWNER: gl.constexpr, MIXED: gl.constexpr):
    count = 0
    kv_count = 0
    item_count = 0
    item = gl.program_id(0)
    rounds = _rounds(items)
    if OWNER:
        item = _dealt(item_count, rounds, H, MIXED)
        q_begin, m, k_begin, n = _ahead(tiles_ptr, item, items, H)
    while item < items:
        if OWNER:
            head = item % H
            next_item = gl.where(item_count + 1 < rounds, _dealt(item_count + 1, rounds, H, MIXED), items)
            next_q, next_m, next_k, next_n = _ahead(tiles_ptr, next_item, items, H)
            tiles = gl.maximum((m + ROWS - 1) // ROWS, 1)
            begin = 0
            place = gl.program_id(0) * q_slots
            tile = 0
            owners = gl.maximum((n + KEYS - 1) // KEYS, 1)
            end = owners
        else:
            head, k_row, left, tile, owners, q_begin, m, slot, tiles, begin = _plan(
                item, tiles_ptr, places_ptr, entries, limit)
            place = head * q_slots + slot
            k_begin = k_row - tile * KEYS
            n = left + tile * KEYS
            end = tile + 1
        for key_tile in range(tile, end):
            k_row = k_begin + key_tile * KEYS
            left = n - key_tile * KEYS
            kv = kv_count % 2
            mbarrier.wait(k_empty.index(kv), ((kv_count // 2) & 1) ^ 1)
            _load_halves(k_desc, head * k_head, k_row, left, k_full.index(kv), k_ring, kv)
            for trip in range(tiles):
                query_tile = begin + trip
                query_tile = gl.where(query_tile >= tiles, query_tile - tiles, query_tile)
                rank = key_tile if OWNER else _rank(query_tile, tile, owners, tiles, limit)
                flags = gl.where(trip == 0, STARTS, 0) + gl.where(trip == tiles - 1, ENDS, 0)
                flags += gl.where(rank == 0, FRESH, 0) + gl.where(rank == owners - 1, LAST, 0)
                at = count % Q_STAGES
                mbarrier.wait(q_empty.index(at), ((count // Q_STAGES) & 1) ^ 1)
                put(notes, NOTES * at, flags)
                put(notes, NOTES * at + 1, place + query_tile)
                put(notes, NOTES * at + 2, q_begin + query_tile * ROWS)
                put(notes, NOTES * at + 3, m - query_tile * ROWS)
                put(notes, NOTES * at + 4, head)
                put(notes, NOTES * at + 5, k_row)
                put(notes, NOTES * at + 6, left)
                mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes)
                load_rows(q_desc, q_begin, m, query_tile * ROWS, head * q_head, q_full.index(at), q_ring.index(at))
                if trip == 0:  # not before the queries: these scores are multiplied while V is of the keys before
                    v_at = kv_count % V_STAGES
                    mbarrier.wait(v_empty.index(v_at), ((kv_count // V_STAGES) & 1) ^ 1)
                    _load_halves(v_desc, head * v_head, k_row, left, v_full.index(v_at), v_ring, v_at)
                at = count % G_STAGES
                mbarrier.wait(g_empty.index(at), ((count // G_STAGES) & 1) ^ 1)
                mbarrier.expect(g_full.index(at), g_desc.block_type.nbytes)
                load_rows(g_desc, q_begin, m, query_tile * ROWS, head * g_head, g_full.index(at), g_ring.index(at))
                count += 1
            kv_count += 1
        if OWNER:
            item = next_item
            q_begin = next_q
            m = next_m
            k_begin = next_k
            n = next_n
        else:
            if owners <= limit:  # others of this sample must not wait for an item that this block keeps for later
                await_count(queue, item - tile + owners - gl.num_programs(0))
            item = gl.atomic_add(queue, 1, sem="relaxed") + gl.num_programs(0)
            at = item_count % 2
            mbarrier.wait(taken.index(at), ((item_count // 2) & 1) ^ 1)
            put(claims, at, item)
            mbarrier.arrive(claimed.index(at), count=1)
        item_count += 1
    at = count % Q_STAGES
    mbarrier.wait(q_empty.index(at), ((count // Q_STAGES) & 1) ^ 1)
    put(notes, NOTES * at, -1)
    mbarrier.arrive(q_full.index(at), count=1)


@gluon.jit
def _add(
    sums_desc, counters_ptr, tiles_ptr, places_ptr, stage, claims, turn, got, stage_full, stage_empty, claimed, taken,
    entries, items, q_slots, limit, PARITY: gl.constexpr):
    """Every second share of the block, added when it is its turn, and every second turn of those that are the last."""
    staged = 0
    turns = 0
    item_count = 0
    item = gl.program_id(0)
    while item < items:
        head, k_row, left, tile, owners, q_begin, m, slot, tiles, begin = _plan(
            item, tiles_ptr, places_ptr, entries, limit)
        for trip in range(tiles):
            query_tile = begin + trip
            query_tile = gl.where(query_tile >= tiles, query_tile - tiles, query_tile)
            rank = _rank(query_tile, tile, owners, tiles, limit)
            place = head * q_slots + slot + query_tile
            if rank == owners - 1:
                if turns % 2 == PARITY:
                    if rank > 0:
                        await_count(counters_ptr + place, rank)
                    mbarrier.wait(got.index(PARITY), ((turns // 2) & 1) ^ 1)
                    mbarrier.arrive(turn.index(PARITY), count=1)
                turns += 1
            else:
                if staged % 2 == PARITY:
                    if rank > 0:
                        await_count(counters_ptr + place, rank)
                    mbarrier.wait(stage_full.index(PARITY), (staged // 2) & 1)
                    if rank == 0:
                        tma.async_copy_shared_to_global(sums_desc, [place * ROWS, 0], stage)
                    else:
                        add_shared_to_global(sums_desc, [place * ROWS, 0], stage)
                    tma.store_wait(0)
                    mbarrier.arrive(stage_empty, count=1)
                    gl.inline_asm_elementwise(
                        """{
                        cp.async.bulk.wait_group 0;
                        bar.warp.sync -1;
                        fence.proxy.async;
                        fence.acq_rel.gpu;
                        st.release.gpu.global.s32 [$1], $2;
                        mov.s32 $0, $2;
                        }""", "=r,l,r", [(counters_ptr + place).to(gl.int64), rank + 1], gl.int32, is_pure=False,
                        pack=1)
                staged += 1
        at = item_count % 2
        mbarrier.wait(claimed.index(at), (item_count // 2) & 1)
        item = get(claims, at, 1)
        mbarrier.arrive(taken.index(at), count=1)
        item_count += 1


# ---- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _flat(x):
    """A [64, 64] product as [4096], in the order in which threads hold it: 16 bytes each, 512 a warp."""
    x = gl.reshape(x, [4, 2, 8, 8, 4, 2])  # warp, row of two, lane row; column of eight, lane column, column of two
    return gl.reshape(gl.permute(x, (0, 3, 2, 4, 1, 5)), [4096])


@gluon.jit
def _unflat(x, layout: gl.constexpr):
    """The [64, 64] product in `layout` that `_flat` made [4096]; no exchange either."""
    x = gl.permute(gl.reshape(x, [4, 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5))
    return gl.convert_layout(gl.reshape(x, [64, 64]), layout, assert_trivial=True)


# Transposes 4 x 4 pairs among four lanes in two steps: with the lane next to this one, then with the one two away.
QUAD = gl.constexpr("""
{
    .reg .pred odd, high;
    .reg .b32 lane, a, b, c, d;
    mov.u32 lane, %laneid;
    and.b32 a, lane, 1;
    setp.ne.u32 odd, a, 0;
    and.b32 a, lane, 2;
    setp.ne.u32 high, a, 0;
    selp.b32 a, $4, $5, odd;
    selp.b32 b, $6, $7, odd;
    shfl.sync.bfly.b32 a, a, 1, 31, -1;
    shfl.sync.bfly.b32 b, b, 1, 31, -1;
    selp.b32 c, a, $4, odd;
    selp.b32 a, $5, a, odd;
    selp.b32 d, b, $6, odd;
    selp.b32 b, $7, b, odd;
    selp.b32 lane, c, d, high;
    shfl.sync.bfly.b32 lane, lane, 2, 31, -1;
    selp.b32 $0, lane, c, high;
    selp.b32 $2, d, lane, high;
    selp.b32 lane, a, b, high;
    shfl.sync.bfly.b32 lane, lane, 2, 31, -1;
    selp.b32 $1, lane, a, high;
    selp.b32 $3, b, lane, high;
}
""")


@gluon.jit
def _runs(x):
    """A [64, 64] product in 16 bit as [128, 32] half rows in which a thread holds 8 neighbours: the four lanes that
    share a row exchange what they hold of four runs. Half row i is half i // 8 % 2 of row
    i // 32 * 16 + i // 16 % 2 * 8 + i % 8."""
    x = gl.reshape(x, [4, 2, 8, 2, 4, 4, 2])  # warp, row of two, lane row; half, run, lane column, column of two
    in_order: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [16, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[32, 0], [64, 0]], block_bases=[], shape=[128, 32])
    x = gl.convert_layout(gl.reshape(gl.permute(x, (0, 1, 3, 2, 5, 4, 6)), [128, 32]), in_order)
    return gl.inline_asm_elementwise(QUAD, "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=x.dtype, is_pure=False, pack=8)


@gluon.jit
def _store_dq(base, tile, rows, stride):
    """The first `rows` rows of a [64, 64] product to memory, 16 bytes a thread."""
    runs = _runs(tile.to(base.dtype.element_ty))
    run = gl.arange(0, 128, gl.SliceLayout(1, runs.type.layout))[:, None]
    column = run // 8 % 2 * 32 + gl.arange(0, 32, gl.SliceLayout(0, runs.type.layout))[None, :]
    row = run // 32 * 16 + run // 16 % 2 * 8 + run % 8
    gl.store(base + row * stride + column, runs, mask=row < rows)


@gluon.jit
def _store_keys(base, tile, rows, stride):
    """The first `rows` rows of a [64, 128] product to memory, 16 bytes a thread."""
    x = gl.reshape(tile.to(base.dtype.element_ty), [4, 2, 8, 4, 4, 4, 2])
    in_order: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warp_bases=[[64, 0], [128, 0]], block_bases=[],
        shape=[256, 32])
    x = gl.convert_layout(gl.reshape(gl.permute(x, (0, 1, 3, 2, 5, 4, 6)), [256, 32]), in_order)
    runs = gl.inline_asm_elementwise(QUAD, "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=x.dtype, is_pure=False, pack=8)
    run = gl.arange(0, 256, gl.SliceLayout(1, in_order))[:, None]
    column = run // 8 % 4 * 32 + gl.arange(0, 32, gl.SliceLayout(0, in_order))[None, :]
    row = run // 64 * 16 + run // 32 % 2 * 8 + run % 8
    gl.store(base + row * stride + column, runs, mask=row < rows)


@gluon.jit
def _consume(
    dq_ptr, dk_ptr, dv_ptr, scratch_ptr, k_ring, v_ring, q_ring, g_ring, ds_ring, stage, notes, k_full, k_empty, v_full,
    v_empty, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, turn, got, stage_full, stage_empty, stride, scale,
    HALF: gl.constexpr, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, OWNER: gl.constexpr):
    dtype: gl.constexpr = k_ring.dtype
    PANEL: gl.constexpr = D // 2  # columns of dq that this warpgroup makes: one swizzled panel of a tile
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    panel: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PANEL], dtype)
    factor = 0.5 * scale if FOLD else scale
    v_factor = 0.5 * scale if FOLD else 1.0
    spread = _flat(gl.zeros([ROWS, PANEL], gl.float32, s_layout))
    cells = gl.arange(0, ROWS * PANEL, spread.type.layout) + HALF * ROWS * PANEL
    count = 0
    kv_count = 0
    staged = 0
    turns = 0
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    dk = gl.zeros([ROWS, D], gl.float32, o_layout)
    dv = gl.zeros([ROWS, D], gl.float32, o_layout)
    mbarrier.wait(q_full.index(0), 0)
    flags = get(notes, 0, 4)
    mbarrier.wait(k_full.index(0), 0, pred=flags >= 0)
    s_next = warpgroup_mma(
        k_ring.index(HALF)._reinterpret(dtype, [ROWS, D], tile),
        q_ring.index(0)._reinterpret(dtype, [ROWS, D], tile).permute((1, 0)), zero, use_acc=False, is_async=True)
    while flags >= 0:
        at = count % Q_STAGES
        g_at = count % G_STAGES
        v_at = kv_count % V_STAGES
        kv = kv_count % 2
        v = v_ring.index(2 * v_at + HALF)._reinterpret(dtype, [ROWS, D], tile)
        k_low = k_ring.index(2 * kv)._reinterpret(dtype, [2, ROWS, PANEL], panel).index(HALF)
        k_high = k_ring.index(2 * kv + 1)._reinterpret(dtype, [2, ROWS, PANEL], panel).index(HALF)
        q = q_ring.index(at)._reinterpret(dtype, [ROWS, D], tile)
        g = g_ring.index(g_at)._reinterpret(dtype, [ROWS, D], tile)
        goes_on = flags & STARTS == 0
        ends = flags & ENDS != 0
        mbarrier.wait(v_full.index(v_at), (kv_count // V_STAGES) & 1)
        mbarrier.wait(g_full.index(g_at), (count // G_STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        dp_next = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        value, slope = weigh(s, scale, ACT, FOLD)
        weights = gl.convert_layout(value.to(dtype), p_layout)
        dv_next = warpgroup_mma(weights, g, dv, use_acc=goes_on, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_next])
        ds = (dp * slope).to(dtype)
        mbarrier.wait(ds_empty, (count & 1) ^ 1)
        ds_ring.index(HALF).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full, count=1)
        if ends:
            mbarrier.arrive(v_empty.index(v_at), count=1)
        ds = gl.convert_layout(ds, p_layout)
        dk_next = warpgroup_mma(ds, q, dk, use_acc=goes_on, is_async=True)
        dv, weights = warpgroup_mma_wait(1, deps=[dv_next, weights])
        # The scores of the next tile, perhaps of the next keys, run beside the end of this one.
        ahead = (count + 1) % Q_STAGES
        kv_ahead = kv_count + gl.where(ends, 1, 0)
        k_ahead = k_ring.index(2 * (kv_ahead % 2) + HALF)._reinterpret(dtype, [ROWS, D], tile)
        q_ahead = q_ring.index(ahead)._reinterpret(dtype, [ROWS, D], tile)
        last = flags & LAST != 0
        sums = scratch_ptr + get(notes, NOTES * at + 1, 4).to(gl.int64) * (ROWS * D)
        if OWNER:
            grows = flags & FRESH == 0
        else:
            grows = last & (flags & FRESH == 0)
            mbarrier.wait(turn.index(turns % 2), (turns // 2) & 1, pred=last)
        share = _unflat(gl.load(sums + cells, mask=(cells >= 0) & grows, other=0.0, cache_modifier=".cg"), s_layout)
        mbarrier.wait(ds_full, count & 1)
        share = warpgroup_mma(ds_ring.index(0).permute((1, 0)), k_low, share, is_async=True)
        share = warpgroup_mma(ds_ring.index(1).permute((1, 0)), k_high, share, is_async=True)
        mbarrier.wait(q_full.index(ahead), ((count + 1) // Q_STAGES) & 1)
        flags_ahead = get(notes, NOTES * ahead, 4)
        mbarrier.wait(k_full.index(kv_ahead % 2), (kv_ahead // 2) & 1, pred=flags_ahead >= 0)
        s_ahead = warpgroup_mma(k_ahead, q_ahead.permute((1, 0)), s, use_acc=False, is_async=True)
        share, dk, ds = warpgroup_mma_wait(1, deps=[share, dk_next, ds])
        s_next = s_ahead
        mbarrier.arrive(ds_empty, count=1)
        mbarrier.arrive(g_empty.index(g_at), count=1)
        if ends:
            mbarrier.arrive(k_empty.index(kv), count=1)
        if last:
            corner = get(notes, NOTES * at + 2, 4).to(gl.int64) * stride + get(notes, NOTES * at + 4, 4) * D
            _store_dq(dq_ptr + corner + HALF * PANEL, share * factor, get(notes, NOTES * at + 3, 4), stride)
            if not OWNER:
                mbarrier.arrive(got.index(turns % 2), count=1)
                turns += 1
        else:
            if OWNER:
                gl.store(sums + cells, _flat(share))
            else:
                mbarrier.wait(stage_empty, (staged & 1) ^ 1)
                flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
                stage._reinterpret(gl.float32, [2, ROWS * PANEL], flat).index(HALF).store(_flat(share))
                fence_async_shared()
                mbarrier.arrive(stage_full.index(staged % 2), count=1)
                staged += 1
        if ends:
            row = get(notes, NOTES * at + 5, 4) + HALF * ROWS
            corner = row.to(gl.int64) * stride + get(notes, NOTES * at + 4, 4) * D
            rows = get(notes, NOTES * at + 6, 4) - HALF * ROWS
            _store_keys(dk_ptr + corner, dk * factor, rows, stride)
            _store_keys(dv_ptr + corner, dv * v_factor, rows, stride)
            kv_count += 1
        mbarrier.arrive(q_empty.index(at), count=1)
        count += 1
        flags = flags_ahead
    warpgroup_mma_wait(0, deps=[s_next, dk, dv])


@gluon.jit(do_not_specialize=["batch", "list_start", "places_start", "q_elements", "kv_elements", "q_slots", "limit"])
def backward(
    q_desc, g_desc, k_desc, v_desc, sums_desc, dq, dk, dv, scratch, counters, q_offsets, kv_offsets, schedule, batch,
    list_start, places_start, q_elements, kv_elements, q_slots, limit, scale, H, q_head, g_head, k_head, v_head,
    ACT: gl.constexpr, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    FOLD: gl.constexpr, OWNER: gl.constexpr, MIXED: gl.constexpr):
    """dq [Tq, H, D], dk and dv [Tkv, H, D] contiguous. One block a multiprocessor.

    scratch: fp32 [tiles, 64 * D], q_slots tiles for each block if OWNER, else H * q_slots. counters: int32 zeros, as
    many and one more (not read if OWNER).
    """
    _zero_rows(dq, gl.load(q_offsets + batch).to(gl.int64) * H * D, q_elements, 1024)
    kv_end = gl.load(kv_offsets + batch).to(gl.int64) * H * D
    _zero_rows(dk, kv_end, kv_elements, 1024)
    _zero_rows(dv, kv_end, kv_elements, 1024)
    entries = gl.load(schedule + 2) if OWNER else gl.load(schedule + 1)
    items = entries * H
    tiles_ptr = schedule + list_start
    places_ptr = schedule + places_start
    dtype: gl.constexpr = q_desc.dtype
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [2 * V_STAGES, 1, 1, ROWS, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(dtype, [G_STAGES, 1, 1, ROWS, D], g_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_ring = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], ds_layout)
    stage = ds_ring if OWNER else gl.allocate_shared_memory(gl.float32, [ROWS, D], sums_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * Q_STAGES, 1], numbers)
    claims = gl.allocate_shared_memory(gl.int32, [2, 1], numbers)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # A barrier that is made and not used would lose its place to other data, and may spoil it: an owner makes none.
    turn, got, stage_full, stage_empty, claimed, taken = k_full, k_full, k_full, ds_full, k_full, k_full
    if not OWNER:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        got = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        stage_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        stage_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        claimed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(G_STAGES):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=2)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        if not OWNER:
            mbarrier.init(turn.index(i), count=1)
            mbarrier.init(got.index(i), count=2)
            mbarrier.init(claimed.index(i), count=1)
            mbarrier.init(taken.index(i), count=2)
            mbarrier.init(stage_full.index(i), count=2)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    if not OWNER:
        mbarrier.init(stage_empty, count=1)
    if OWNER:
        gl.warp_specialize([
            (_consume, (
                dq, dk, dv, scratch, k_ring, v_ring, q_ring, g_ring, ds_ring, stage, notes, k_full, k_empty, v_full,
                v_empty, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, turn, got, stage_full, stage_empty, H * D,
                scale, 0, D, Q_STAGES, G_STAGES, V_STAGES, ACT, FOLD, OWNER)),
            (_consume, (
                dq, dk, dv, scratch, k_ring, v_ring, q_ring, g_ring, ds_ring, stage, notes, k_full, k_empty, v_full,
                v_empty, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, turn, got, stage_full, stage_empty, H * D,
                scale, 1, D, Q_STAGES, G_STAGES, V_STAGES, ACT, FOLD, OWNER)),
            (_produce, (
                q_desc, g_desc, k_desc, v_desc, tiles_ptr, places_ptr, k_ring, v_ring, q_ring, g_ring, notes, claims,
                k_full, k_empty, v_full, v_empty, q_full, q_empty, g_full, g_empty, claimed, taken, entries, items,
                counters, q_slots, limit, H, q_head, g_head, k_head, v_head, D, Q_STAGES, G_STAGES, V_STAGES, OWNER,
                MIXED)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_consume, (
                dq, dk, dv, scratch, k_ring, v_ring, q_ring, g_ring, ds_ring, stage, notes, k_full, k_empty, v_full,
                v_empty, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, turn, got, stage_full, stage_empty, H * D,
                scale, 0, D, Q_STAGES, G_STAGES, V_STAGES, ACT, FOLD, OWNER)),
            (_consume, (
                dq, dk, dv, scratch, k_ring, v_ring, q_ring, g_ring, ds_ring, stage, notes, k_full, k_empty, v_full,
                v_empty, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, turn, got, stage_full, stage_empty, H * D,
                scale, 1, D, Q_STAGES, G_STAGES, V_STAGES, ACT, FOLD, OWNER)),
            (_produce, (
                q_desc, g_desc, k_desc, v_desc, tiles_ptr, places_ptr, k_ring, v_ring, q_ring, g_ring, notes, claims,
                k_full, k_empty, v_full, v_empty, q_full, q_empty, g_full, g_empty, claimed, taken, entries, items,
                counters + H * q_slots, q_slots, limit, H, q_head, g_head, k_head, v_head, D, Q_STAGES, G_STAGES,
                V_STAGES, OWNER, MIXED)),
            (_add, (
                sums_desc, counters, tiles_ptr, places_ptr, stage, claims, turn, got, stage_full, stage_empty, claimed,
                taken, entries, items, q_slots, limit, 0)),
            (_add, (
                sums_desc, counters, tiles_ptr, places_ptr, stage, claims, turn, got, stage_full, stage_empty, claimed,
                taken, entries, items, q_slots, limit, 1)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
