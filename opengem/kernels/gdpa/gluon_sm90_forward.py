"""GDPA forward for Hopper: flat pipeline."""

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
from opengem.kernels.gdpa.gluon_sm90 import BOUND, ROWS, _load_rows, _rounds, _zero_rows

act_value = gluon.jit(shared.act_value.fn)
_tanh = gluon.jit(shared._tanh.fn)
TANH_A = gl.constexpr(shared.TANH_A.value)
TANH_AB = gl.constexpr(shared.TANH_AB.value)


@gluon.jit
def _value(s, scale, ACT: gl.constexpr, FOLD: gl.constexpr):
    if FOLD:
        if ACT == "none":
            return s
        elif ACT == "silu":
            return s + s * _tanh(s * (0.5 * scale), True)
        else:
            a = TANH_A * scale
            b = TANH_AB * scale * scale * scale
            return s + s * _tanh(s * (a + b * (s * s)), True)
    else:
        return act_value(s * scale, ACT, True)


@gluon.jit
def _item(schedule, turn, rounds, H):
    """(head, first query row, query rows left, first key, keys) of this block's `turn`-th item; no rows past the last."""
    blocks = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = blocks - 1 - place
    item = turn * blocks + place
    entry = schedule + 4 * (item // H)
    live = turn < rounds
    return (item % H, gl.load(entry, mask=live, other=0), gl.load(entry + 1, mask=live, other=0),
            gl.load(entry + 2, mask=live, other=0), gl.load(entry + 3, mask=live, other=0))


@gluon.jit
def _next_item(schedule, turn, rounds, H):
    """The next item that has queries."""
    turn += 1
    head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H)
    while (turn < rounds) & (q_left == 0):
        turn += 1
        head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H)
    return turn, head, q_row, q_left, kv_length


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, schedule, count, H, q_head, k_head, v_head, q_ring, k_ring, v_ring, q_full, q_empty,
    k_full, k_empty, v_full, v_empty, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr,
    RESIDENT: gl.constexpr):
    q_loads0 = 0
    q_loads1 = 0
    kv_loads = 0
    rounds = _rounds(count * H)
    for turn in range(0, rounds):
        head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H)
        q_rows = q_left if RESIDENT else gl.minimum(q_left, 2 * ROWS)
        q_end = gl.where(q_rows > 0, gl.maximum(q_rows, 2 * ROWS), 0)  # each warpgroup takes part in every item
        for first in range(0, q_end, ROWS):
            side = (first // ROWS + turn) % 2
            loads = q_loads1 if side == 1 else q_loads0
            slot = side * Q_STAGES + loads % Q_STAGES
            mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            _load_rows(q_desc, head * q_head, q_row, q_left, first, q_full.index(slot), q_ring.index(slot))
            q_loads1 += side
            q_loads0 += 1 - side
            if first == ROWS:
                for start in range(0, gl.maximum(kv_length, 1), BN):
                    place = kv_loads % STAGES
                    phase = ((kv_loads // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(place), phase)
                    mbarrier.expect(k_full.index(place), k_desc.block_type.nbytes)
                    _load_rows(k_desc, head * k_head, kv_begin, kv_length, start, k_full.index(place),
                               k_ring.index(place))
                    mbarrier.wait(v_empty.index(place), phase)
                    mbarrier.expect(v_full.index(place), v_desc.block_type.nbytes)
                    _load_rows(v_desc, head * v_head, kv_begin, kv_length, start, v_full.index(place),
                               v_ring.index(place))
                    kv_loads += 1


@gluon.jit
def consume(
    o_desc, schedule, count, H, scale, q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, go,
    HALF: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    ACT: gl.constexpr, RESIDENT: gl.constexpr, FOLD: gl.constexpr, QREG: gl.constexpr,
    TURNS: gl.constexpr):
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    factor = 0.5 * scale if FOLD else 1.0
    rounds = _rounds(count * H)
    zero = rounds * 0  # a constant would have another type than what a loop carries
    turn, head, q_row, q_left, kv_length = _next_item(schedule, zero - 1, rounds, H)
    base = zero
    steps = zero
    first = ROWS * ((HALF + turn) % 2)
    rows = q_left if RESIDENT else gl.minimum(q_left, 2 * ROWS)
    live = turn < rounds
    loads = zero
    j = zero
    mbarrier.wait(q_full.index(HALF * Q_STAGES), 0, pred=live)
    mbarrier.wait(k_full.index(base % STAGES), (base // STAGES) & 1, pred=live)
    q_here = q_ring.index(HALF * Q_STAGES)._reinterpret(dtype, [ROWS, D], q_layout)
    s = gl.zeros([ROWS, BN], gl.float32, s_layout)
    k = k_ring.index(base % STAGES)._reinterpret(dtype, [BN, D], kv_layout)
    if QREG:
        q = q_here.load(a_layout)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(q_here, k.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(base % STAGES), count=1, pred=live & (first + 2 * ROWS >= rows))
    p = gl.convert_layout(_value(s, scale, ACT, FOLD).to(dtype), p_layout)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    leaving = zero > 0
    while live:
        last = (j + 1) * BN >= kv_length
        done = first + 2 * ROWS >= rows
        place = (base + j) % STAGES
        phase = ((base + j) // STAGES) & 1
        slot = HALF * Q_STAGES + loads % Q_STAGES
        o_row = q_row + q_left
        o_at = BOUND - q_left + first
        o_head = head
        used = j > 0
        if last:
            loads += 1
            first += 2 * ROWS
            if done:
                base += j + 1
                turn, head, q_row, q_left, kv_length = _next_item(schedule, turn, rounds, H)
                first = ROWS * ((HALF + turn) % 2)
                rows = q_left if RESIDENT else gl.minimum(q_left, 2 * ROWS)
            j = 0
        else:
            j += 1
        live = turn < rounds
        ahead = HALF * Q_STAGES + loads % Q_STAGES
        place_ahead = (base + j) % STAGES
        mbarrier.wait(q_full.index(ahead), (loads // Q_STAGES) & 1, pred=live & last)
        mbarrier.wait(k_full.index(place_ahead), ((base + j) // STAGES) & 1, pred=live)
        q_next = q_ring.index(ahead)._reinterpret(dtype, [ROWS, D], q_layout)
        k = k_ring.index(place_ahead)._reinterpret(dtype, [BN, D], kv_layout)
        if TURNS:
            mbarrier.wait(go.index(HALF), (steps & 1) ^ (1 - HALF))
        s = gl.zeros([ROWS, BN], gl.float32, s_layout)
        if QREG:
            if last:
                q = q_next.load(a_layout)
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        else:
            s = warpgroup_mma(q_next, k.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(place), phase)
        v = v_ring.index(place)._reinterpret(dtype, [BN, D], kv_layout)
        acc = warpgroup_mma(p, v, acc, use_acc=used, is_async=True)
        if TURNS:
            mbarrier.arrive(go.index(1 - HALF), count=1)
            steps += 1
        s = warpgroup_mma_wait(1, deps=[s])
        if live & (first + 2 * ROWS >= rows):
            mbarrier.arrive(k_empty.index(place_ahead), count=1)
        if leaving:  # by now the tile before has left its place
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(HALF * Q_STAGES + (loads - 1 - last.to(gl.int32)) % Q_STAGES), count=1)
        p_next = gl.convert_layout(_value(s, scale, ACT, FOLD).to(dtype), p_layout)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        if done:
            mbarrier.arrive(v_empty.index(place), count=1)
        if last:
            # The queries were read for the last time: their place takes the output on its way out.
            out = q_ring.index(slot)
            gl.thread_barrier()
            out._reinterpret(dtype, [ROWS, D], q_layout).store((acc * factor).to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(o_desc, [BOUND, o_row, o_at, o_head * D], out)
        leaving = last
        p = p_next
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "list_start", "out_elements"])
def forward(
    q_desc, k_desc, v_desc, o_desc, out, offsets, schedule, batch, list_start, out_elements, scale, H, q_head,
    k_head, v_head, ACT: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, RESIDENT: gl.constexpr, FOLD: gl.constexpr, QREG: gl.constexpr,
    TURNS: gl.constexpr):
    """out [rows, H, D] contiguous. Grid: one block an SM; launched with 4 warps (the first consumer's)."""
    _zero_rows(out, gl.load(offsets + batch).to(gl.int64) * H * D, out_elements, 1024)
    count = gl.load(schedule + 2) if RESIDENT else gl.load(schedule)
    items = schedule + list_start
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES] + q_desc.block_type.shape, q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(go.index(i), count=1)
    for i in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (consume, (o_desc, items, count, H, scale, q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, go, 0, Q_STAGES, STAGES, BN, D, ACT, RESIDENT, FOLD, QREG, TURNS)),
        (consume, (o_desc, items, count, H, scale, q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, go, 1, Q_STAGES, STAGES, BN, D, ACT, RESIDENT, FOLD, QREG, TURNS)),
        (produce, (q_desc, k_desc, v_desc, items, count, H, q_head, k_head, v_head, q_ring, k_ring, v_ring, q_full,
                   q_empty, k_full, k_empty, v_full, v_empty, Q_STAGES, STAGES, BN, RESIDENT)),
    ], [4, 1], [240, 24])
