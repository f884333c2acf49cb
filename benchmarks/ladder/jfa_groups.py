"""The products of the Hopper backward at head_dim 64: three groups of warps, two of 64 keys each, one that sums dq.

The two warpgroups that form scores, dk and dv go their own ways, so that the products of one run beside the
exponentials of the other. The third takes dS from shared memory, forms dq, waits for the block's turn and adds. (At
head_dim 128 dk and dv leave too few registers for a third group: `gluon_sm90_backward`.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.jfa.gluon_sm90 import LOG2E, get, matrix
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


@gluon.jit
def _next_scores(
    k_ring, q_ring, notes, q_full, kv_full, count, kv_count, s, HALF: gl.constexpr, HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr, STAGES: gl.constexpr):
    """(scores of tile `count`, in flight; its flags): they run beside the end of the tile before."""
    at = count % STAGES
    mbarrier.wait(q_full.index(at), (count // STAGES) & 1)
    flags = get(notes, 8 * at, 4)
    mbarrier.wait(kv_full.index(kv_count % 2), (kv_count // 2) & 1, pred=flags >= 0)
    q = matrix(q_ring.index(at), QUERIES, HEAD_DIM)
    s = warpgroup_mma(
        matrix(k_ring.index(kv_count % 2 * 2 + HALF), 64, HEAD_DIM), q.permute((1, 0)), s, use_acc=False,
        is_async=True)
    return s, flags


@gluon.jit
def _consume(
    k_ring, v_ring, dk_ring, q_ring, do_ring, stats_ring, steps_ring, ds_ring, notes, kv_full, staged, q_full, do_full,
    empty, ds_full, ds_free, scale, left, right, HALF: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr):
    """dk and dv of one half of the keys of each item."""
    dtype: gl.constexpr = k_ring.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale2 = scale * LOG2E
    steps = steps_ring.slice(64 * HALF, 64)
    steps.store(gl.arange(0, 64, gl.SliceLayout(1, s_layout)))
    count = 0
    kv_count = 0
    zero = gl.zeros([64, QUERIES], gl.float32, s_layout)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
    s_next, flags = _next_scores(k_ring, q_ring, notes, q_full, kv_full, 0, 0, zero, HALF, HEAD_DIM, QUERIES, STAGES)
    while flags >= 0:
        at = count % STAGES
        kv = kv_count % 2 * 2 + HALF
        v = matrix(v_ring.index(kv), 64, HEAD_DIM)
        q = matrix(q_ring.index(at), QUERIES, HEAD_DIM)
        dout = matrix(do_ring.index(at), QUERIES, HEAD_DIM)
        stats = stats_ring.index(at)._reinterpret(gl.float32, [2, QUERIES], flat)
        mbarrier.wait(do_full.index(at), (count // STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        dp_next = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse2 = stats.index(0).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * scale2 - lse2[None, :])
        p = visible(p, flags, steps, notes, at, right, left, 64 * HALF, HAS_LEFT, HAS_RIGHT, QUERIES, 4)
        weights = gl.convert_layout(p.to(dtype), p_layout)
        goes_on = flags & STARTS == 0
        dv_next = warpgroup_mma(weights, dout, dv, use_acc=goes_on, is_async=True)
        delta = stats.index(1).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(1, deps=[dp_next])
        ds = (p * (dp - delta[None, :])).to(dtype)
        place = count % DEPTH
        mbarrier.wait(ds_free.index(place), ((count // DEPTH) & 1) ^ 1)
        ds_ring.index(2 * place + HALF).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(place), count=1)
        ds = gl.convert_layout(ds, p_layout)
        dk_next = warpgroup_mma(ds, q, dk, use_acc=goes_on, is_async=True)
        s_next, flags_ahead = _next_scores(
            k_ring, q_ring, notes, q_full, kv_full, count + 1, kv_count + gl.where(flags & ENDS != 0, 1, 0), s, HALF,
            HEAD_DIM, QUERIES, STAGES)
        dk, ds, dv, weights = warpgroup_mma_wait(1, deps=[dk_next, ds, dv_next, weights])
        mbarrier.arrive(empty.index(at), count=1)
        if flags & ENDS != 0:
            matrix(dk_ring.index(kv), 64, HEAD_DIM).store((dk * scale).to(dtype))
            v.store(dv.to(dtype))
            fence_async_shared()
            mbarrier.arrive(staged.index(kv_count % 2), count=1)
            kv_count += 1
        count += 1
        flags = flags_ahead
    warpgroup_mma_wait(0, deps=[s_next, dk, dv])


@gluon.jit
def _sum(
    dq_ptr, scratch_ptr, k_ring, ds_ring, notes, kv_full, staged, q_full, empty, ds_full, ds_free, turn, done, q_stride,
    scale, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr):
    """The share of each dq tile, added when it is the block's turn."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    VALUES: gl.constexpr = QUERIES * HEAD_DIM // 128
    count = 0
    kv_count = 0
    mbarrier.wait(q_full.index(0), 0)
    flags = get(notes, 0, 4)
    while flags >= 0:
        at = count % STAGES
        address = scratch_ptr.to(gl.int64) + get(notes, 8 * at + 1, 4).to(gl.int64) * (4 * QUERIES * HEAD_DIM)
        row = get(notes, 8 * at + 4, 4)
        rows = get(notes, 8 * at + 5, 4)
        column = get(notes, 8 * at + 6, 4) * HEAD_DIM
        mbarrier.arrive(empty.index(at), count=1)
        kv = kv_count % 2
        mbarrier.wait(kv_full.index(kv), (kv_count // 2) & 1)
        place = count % DEPTH
        mbarrier.wait(ds_full.index(place), (count // DEPTH) & 1)
        share = gl.zeros([QUERIES, HEAD_DIM], gl.float32, layout)
        for half in gl.static_range(2):
            share = warpgroup_mma(
                ds_ring.index(2 * place + half).permute((1, 0)), matrix(k_ring.index(2 * kv + half), 64, HEAD_DIM),
                share, use_acc=half > 0, is_async=True)
        share = warpgroup_mma_wait(0, deps=[share])
        mbarrier.arrive(ds_free.index(place), count=1)
        if flags & ENDS != 0:
            mbarrier.arrive(staged.index(kv), count=1)
            kv_count += 1
        mode = gl.where(flags & LAST != 0, 2, gl.where(flags & FRESH != 0, 0, 1))
        turn_at = count % TURNS
        mbarrier.wait(turn.index(turn_at), (count // TURNS) & 1)
        add_share(address, share, mode, VALUES, 128)
        mbarrier.arrive(done.index(turn_at), count=1)
        if flags & LAST != 0:
            if flags & FRESH == 0:
                share += sum_so_far(address, share, VALUES, 128)
            store(dq_ptr, share * scale, row, rows, column, q_stride, QUERIES, HEAD_DIM, 4)
        count += 1
        mbarrier.wait(q_full.index(count % STAGES), (count // STAGES) & 1)
        flags = get(notes, 8 * (count % STAGES), 4)


@gluon.jit(do_not_specialize=["slots", "items", "q_slots", "limit", "left", "right"])
def kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_ptr, scratch_ptr, counters_ptr, records_ptr,
    slots, items, q_slots, q_stride, scale, limit, left, right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    DEALT: gl.constexpr):
    """DEALT: blocks take every so-many-th item instead of the next one of a queue, which they know ahead."""
    dtype: gl.constexpr = q_desc.dtype
    DEPTH: gl.constexpr = 2  # tiles of dS in flight
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [4, 1, 1, KEYS // 2, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [4, 1, 1, KEYS // 2, HEAD_DIM], v_desc.layout)
    dk_ring = gl.allocate_shared_memory(dtype, [4, 1, 1, KEYS // 2, HEAD_DIM], dk_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, HEAD_DIM], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, HEAD_DIM], do_desc.layout)
    stats_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, QUERIES], stats_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS // 2, QUERIES], dtype)
    ds_ring = gl.allocate_shared_memory(dtype, [2 * DEPTH, KEYS // 2, QUERIES], ds_layout)
    notes = gl.allocate_shared_memory(gl.int32, [8 * STAGES, 1], numbers)
    steps_ring = gl.allocate_shared_memory(gl.int32, [KEYS], numbers)
    places = gl.allocate_shared_memory(gl.int32, [8, 1], numbers)
    claims = gl.allocate_shared_memory(gl.int32, [2, 1], numbers)
    orders = gl.allocate_shared_memory(gl.int32, [2 * TURNS, 1], numbers)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    claimed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    for i in gl.static_range(DEPTH):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_free.index(i), count=1)
    for i in gl.static_range(TURNS):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(staged.index(i), count=3)
        if not DEALT:  # a barrier that nobody waits for shares its memory with a tile, and would be written over it
            mbarrier.init(claimed.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
    gl.warp_specialize([
        (_consume, (k_ring, v_ring, dk_ring, q_ring, do_ring, stats_ring, steps_ring, ds_ring, notes, kv_full, staged,
                    q_full, do_full, empty, ds_full, ds_free, scale, left, right, 0, HAS_LEFT, HAS_RIGHT, HEAD_DIM,
                    QUERIES, STAGES, DEPTH)),
        (_consume, (k_ring, v_ring, dk_ring, q_ring, do_ring, stats_ring, steps_ring, ds_ring, notes, kv_full, staged,
                    q_full, do_full, empty, ds_full, ds_free, scale, left, right, 1, HAS_LEFT, HAS_RIGHT, HEAD_DIM,
                    QUERIES, STAGES, DEPTH)),
        (_sum, (dq_ptr, scratch_ptr, k_ring, ds_ring, notes, kv_full, staged, q_full, empty, ds_full, ds_free, turn,
                done, q_stride, scale, HEAD_DIM, QUERIES, STAGES, DEPTH)),
        (produce, (q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, records_ptr, k_ring, v_ring, dk_ring,
                    q_ring, do_ring, stats_ring, notes, places, claims, kv_full, staged, q_full, do_full, empty,
                    claimed, taken, slots, items, q_slots, limit, left, right, GROUP, HAS_LEFT, HAS_RIGHT, HEAD_DIM,
                    QUERIES, KEYS, STAGES, DEALT)),
        (await_turns, (counters_ptr, records_ptr, claims, orders, turn, done, told, claimed, taken, slots, items,
                        q_slots, limit, left, right, GROUP, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS, DEALT)),
        (tell, (counters_ptr, orders, done, told, empty, STAGES, False, 0, 1)),
    ], [4, 4, 1, 1, 1], [192, 88, 40, 40, 40])
