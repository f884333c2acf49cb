"""GDPA backward for Hopper (sm_90) in one kernel and five products. Read `gluon_sm90.py` first.

A work item is a sample and head. Its keys come in tiles of 128: each of two consumer warpgroups keeps 64 of them, with
the sums of dk and dv in registers, while tiles of 64 queries stream by. S^T = K Q^T and dP^T = V dO^T are computed
directly, so P^T and dS^T enter dv and dk from registers. dS^T also goes through shared memory: each warpgroup then
makes one half of the columns of dq = dS K, summed over all 128 keys.

One block owns all keys of a sample, so dq grows from key tile to key tile in fp32 scratch that only this block touches,
each element written and read back by one thread: no atomics, no order between blocks. Scratch has no rows and columns:
it lies in the order in which threads hold a product, 16 bytes each. Few keys (two tiles) cost one trip of dq through
the L2; the last tile writes dq itself, 16 bytes a thread too, after the four lanes of a row have exchanged.
"""

import triton.language as tl
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
from opengem.kernels.gdpa.gluon_sm90 import BOUND, ROWS, _load_rows, _record, _rounds, _zero_rows

act_both = gluon.jit(shared.act_both.fn)
_tanh = gluon.jit(shared._tanh.fn)
TANH_A = gl.constexpr(shared.TANH_A.value)
TANH_AB = gl.constexpr(shared.TANH_AB.value)


@gluon.jit
def weigh(s, scale, ACT: gl.constexpr, FOLD: gl.constexpr):
    """(value, slope) of scores s before scaling; with FOLD both still lack their factor scale / 2 and 1 / 2."""
    if FOLD:
        u = s * s
        if ACT == "silu":
            bend = 0.5 * scale
            t = _tanh(s * bend, True)
        else:
            a = TANH_A * scale
            b = TANH_AB * scale * scale * scale
            t = _tanh(s * (a + b * u), True)
            bend = a + 3.0 * b * u
        return s + s * t, (1.0 + t) + (s - s * t * t) * bend
    else:
        return act_both(s * scale, ACT, True)


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
def produce_fused(
    q_desc, g_desc, k_desc, v_desc, schedule, count, H, q_head, g_head, k_head, v_head, q_ring, g_ring, k_ring, v_ring,
    q_full, q_empty, g_full, g_empty, kv_full, kv_empty, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr,
    KV_STAGES: gl.constexpr):
    loads = 0
    kv_loads = 0
    for turn in range(0, _rounds(count * H)):
        head, row, left, begin, length = _record(schedule, turn, H)
        q_tiles = (gl.maximum(left, 1) + ROWS - 1) // ROWS
        for start in range(0, gl.maximum(length, 1), 2 * ROWS):
            place = kv_loads % KV_STAGES
            mbarrier.wait(kv_empty.index(place), ((kv_loads // KV_STAGES) & 1) ^ 1)
            mbarrier.expect(kv_full.index(place), 4 * k_desc.block_type.nbytes)
            for half in gl.static_range(2):
                at = 2 * place + half
                _load_rows(k_desc, head * k_head, begin, length, start + half * ROWS, kv_full.index(place),
                           k_ring.index(at))
                _load_rows(v_desc, head * v_head, begin, length, start + half * ROWS, kv_full.index(place),
                           v_ring.index(at))
            kv_loads += 1
            for step in range(0, q_tiles):
                first = step * ROWS
                slot = loads % Q_STAGES
                mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
                _load_rows(q_desc, head * q_head, row, left, first, q_full.index(slot), q_ring.index(slot))
                slot = loads % G_STAGES
                mbarrier.wait(g_empty.index(slot), ((loads // G_STAGES) & 1) ^ 1)
                mbarrier.expect(g_full.index(slot), g_desc.block_type.nbytes)
                _load_rows(g_desc, head * g_head, row, left, first, g_full.index(slot), g_ring.index(slot))
                loads += 1


@gluon.jit
def consume_fused(
    dq, scratch, dk_desc, dv_desc, schedule, count, H, scale, q_ring, g_ring, k_ring, v_ring, ds_ring, q_full, q_empty,
    g_full, g_empty, kv_full, kv_empty, ds_full, ds_empty, HALF: gl.constexpr, Q_STAGES: gl.constexpr,
    G_STAGES: gl.constexpr, KV_STAGES: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr):
    dtype: gl.constexpr = q_ring.dtype
    PANEL: gl.constexpr = D // 2  # columns of dq that this warpgroup makes: one swizzled panel of a tile
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    panel_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PANEL], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, ROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    factor = 0.5 * scale if FOLD else scale
    v_factor = 0.5 * scale if FOLD else 1.0
    spread = _flat(gl.zeros([ROWS, PANEL], gl.float32, s_layout))
    cells = gl.arange(0, ROWS * PANEL, spread.type.layout) + HALF * ROWS * PANEL
    runs = _runs(gl.zeros([ROWS, PANEL], dtype, s_layout))
    run = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, runs.type.layout))[:, None]
    out_row = run // 32 * 16 + run // 16 % 2 * 8 + run % 8
    out_cells = (out_row * (H * D) + run // 8 % 2 * 32 + HALF * PANEL
                 + gl.arange(0, PANEL // 2, gl.SliceLayout(0, runs.type.layout))[None, :])
    tiles = 0
    kv = 0
    rounds = _rounds(count * H)
    mbarrier.wait(kv_full.index(0), 0, pred=rounds > 0)
    mbarrier.wait(q_full.index(0), 0, pred=rounds > 0)
    s = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    s = warpgroup_mma(k_ring.index(HALF)._reinterpret(dtype, [ROWS, D], tile_layout),
                      q_ring.index(0)._reinterpret(dtype, [ROWS, D], tile_layout).permute((1, 0)), s, use_acc=False,
                      is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for turn in tl.range(0, rounds, disable_licm=True):
        head, row, left, begin, length = _record(schedule, turn, H)
        q_tiles = (gl.maximum(left, 1) + ROWS - 1) // ROWS
        at_row = row.to(gl.int64) * H * D + head * D
        out = dq + at_row
        for start in tl.range(0, gl.maximum(length, 1), 2 * ROWS, disable_licm=True):
            place = kv % KV_STAGES
            v_mine = v_ring.index(2 * place + HALF)._reinterpret(dtype, [ROWS, D], tile_layout)
            k_low = k_ring.index(2 * place)._reinterpret(dtype, [2, ROWS, PANEL], panel_layout).index(HALF)
            k_high = k_ring.index(2 * place + 1)._reinterpret(dtype, [2, ROWS, PANEL], panel_layout).index(HALF)
            grows = start > 0
            final = start + 2 * ROWS >= length
            more = (turn + 1 < rounds) | (start + 2 * ROWS < length)
            dk = gl.zeros([ROWS, D], gl.float32, o_layout)
            dv = gl.zeros([ROWS, D], gl.float32, o_layout)
            for step in tl.range(0, q_tiles, disable_licm=True):
                first = step * ROWS
                q_slot = tiles % Q_STAGES
                g_slot = tiles % G_STAGES
                q = q_ring.index(q_slot)._reinterpret(dtype, [ROWS, D], tile_layout)
                g = g_ring.index(g_slot)._reinterpret(dtype, [ROWS, D], tile_layout)
                mbarrier.wait(g_full.index(g_slot), (tiles // G_STAGES) & 1)
                dp = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
                dp = warpgroup_mma(v_mine, g.permute((1, 0)), dp, use_acc=False, is_async=True)
                value, slope = weigh(s, scale, ACT, FOLD)
                p = gl.convert_layout(value.to(dtype), p_layout)
                dv = warpgroup_mma(p, g, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                ds = (dp * slope).to(dtype)
                mbarrier.wait(ds_empty, (tiles & 1) ^ 1)
                ds_ring.index(HALF).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full, count=1)
                ds = gl.convert_layout(ds, p_layout)
                dk = warpgroup_mma(ds, q, dk, is_async=True)
                ended = step + 1 == q_tiles
                ahead = (tiles + 1) % Q_STAGES
                kv_ahead = kv + ended.to(gl.int32)
                place_ahead = kv_ahead % KV_STAGES
                dv, p = warpgroup_mma_wait(1, deps=[dv, p])
                mbarrier.wait(q_full.index(ahead), ((tiles + 1) // Q_STAGES) & 1, pred=more | (step + 1 < q_tiles))
                mbarrier.wait(kv_full.index(place_ahead), (kv_ahead // KV_STAGES) & 1, pred=more & ended)
                s = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
                s = warpgroup_mma(
                    k_ring.index(2 * place_ahead + HALF)._reinterpret(dtype, [ROWS, D], tile_layout),
                    q_ring.index(ahead)._reinterpret(dtype, [ROWS, D], tile_layout).permute((1, 0)), s,
                    use_acc=False, is_async=True)
                share = scratch + first * D + cells  # all 64 rows, also those that are nobody's
                grown = _unflat(gl.load(share, mask=(cells >= 0) & grows, other=0.0), s_layout)
                mbarrier.wait(ds_full, tiles & 1)
                grown = warpgroup_mma(ds_ring.index(0).permute((1, 0)), k_low, grown, is_async=True)
                grown = warpgroup_mma(ds_ring.index(1).permute((1, 0)), k_high, grown, is_async=True)
                s, grown, dk, ds = warpgroup_mma_wait(0, deps=[s, grown, dk, ds])
                mbarrier.arrive(ds_empty, count=1)
                mbarrier.arrive(q_empty.index(q_slot), count=1)
                mbarrier.arrive(g_empty.index(g_slot), count=1)
                if final:
                    gl.store(out + first * H * D + out_cells, _runs((grown * factor).to(dtype)),
                             mask=out_row < left - first)
                else:
                    gl.store(share, _flat(grown))
                tiles += 1
            # Nobody else reads these rows of V; those of K once the other warpgroup has made its half of dq.
            v_mine.store((dv * v_factor).to(dtype))
            mbarrier.wait(ds_empty, (tiles - 1) & 1)
            k_mine = k_ring.index(2 * place + HALF)._reinterpret(dtype, [ROWS, D], tile_layout)
            k_mine.store((dk * factor).to(dtype))
            fence_async_shared()
            at = BOUND - length + start + HALF * ROWS
            tma.async_copy_shared_to_global(dv_desc, [BOUND, begin + length, at, head * D],
                                            v_ring.index(2 * place + HALF))
            tma.async_copy_shared_to_global(dk_desc, [BOUND, begin + length, at, head * D],
                                            k_ring.index(2 * place + HALF))
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(place), count=1)
            kv += 1


@gluon.jit(do_not_specialize=["batch", "list_start", "q_elements", "kv_elements", "scratch_rows"])
def fused(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, dq, dk, dv, scratch, q_offsets, kv_offsets, schedule,
    batch, list_start, q_elements, kv_elements, scratch_rows, scale, H, q_head, g_head, k_head, v_head,
    ACT: gl.constexpr, D: gl.constexpr, Q_STAGES: gl.constexpr, G_STAGES: gl.constexpr, FOLD: gl.constexpr):
    """dq [Tq, H, D], dk and dv [Tkv, H, D] contiguous; scratch fp32 [blocks, scratch_rows, D]. One block an SM."""
    KV_STAGES: gl.constexpr = 2  # the next keys are multiplied before the sums of these have left
    _zero_rows(dq, gl.load(q_offsets + batch).to(gl.int64) * H * D, q_elements, 1024)
    kv_end = gl.load(kv_offsets + batch).to(gl.int64) * H * D
    _zero_rows(dk, kv_end, kv_elements, 1024)
    _zero_rows(dv, kv_end, kv_elements, 1024)
    count = gl.load(schedule + 2)
    items = schedule + list_start
    sums = scratch + gl.program_id(0).to(gl.int64) * scratch_rows * D
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES] + q_desc.block_type.shape, q_desc.layout)
    g_ring = gl.allocate_shared_memory(g_desc.dtype, [G_STAGES] + g_desc.block_type.shape, g_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [2 * KV_STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [2 * KV_STAGES] + v_desc.block_type.shape, v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], q_desc.dtype)
    ds_ring = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, ROWS], ds_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(G_STAGES):
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=2)
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    # Nobody waits on the spare ones. They keep the compiled code that of the measurement (benchmarks/log/gdpa.md).
    spare_one = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spare_two = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(spare_one.index(i), count=1)
        mbarrier.init(spare_two.index(i), count=2)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    gl.warp_specialize([
        (consume_fused, (dq, sums, dk_desc, dv_desc, items, count, H, scale, q_ring, g_ring, k_ring, v_ring, ds_ring,
                         q_full, q_empty, g_full, g_empty, kv_full, kv_empty, ds_full, ds_empty, 0, Q_STAGES,
                         G_STAGES, KV_STAGES, D, ACT, FOLD)),
        (consume_fused, (dq, sums, dk_desc, dv_desc, items, count, H, scale, q_ring, g_ring, k_ring, v_ring, ds_ring,
                         q_full, q_empty, g_full, g_empty, kv_full, kv_empty, ds_full, ds_empty, 1, Q_STAGES,
                         G_STAGES, KV_STAGES, D, ACT, FOLD)),
        (produce_fused, (q_desc, g_desc, k_desc, v_desc, items, count, H, q_head, g_head, k_head, v_head, q_ring,
                         g_ring, k_ring, v_ring, q_full, q_empty, g_full, g_empty, kv_full, kv_empty, Q_STAGES,
                         G_STAGES, KV_STAGES)),
    ], [4, 1], [240, 24])
