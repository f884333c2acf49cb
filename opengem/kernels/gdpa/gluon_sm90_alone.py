"""Forward in which a warpgroup without queries takes no part (for a measurement)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opengem.kernels.gdpa.gluon_sm90 import BOUND, NOTES, ROWS, _ahead, _dealt, _load_rows, _meet, _value, _zero_rows
from opengem.kernels.jfa.gluon_sm90 import get, put


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, schedule, items, H, q_head, k_head, v_head, q_ring, k_ring, v_ring, notes, q_full,
    q_empty, k_full, k_empty, v_full, v_empty, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr,
    RESIDENT: gl.constexpr):
    q_loads0 = 0
    q_loads1 = 0
    kv_loads = 0
    turn = 0
    item = gl.program_id(0)
    q_row, q_left, kv_begin, kv_length = _ahead(schedule, item, items, H)
    while item < items:
        head = item % H
        next_item = _dealt(turn + 1)
        next_q_row, next_q_left, next_begin, next_length = _ahead(schedule, next_item, items, H)
        q_rows = q_left if RESIDENT else gl.minimum(q_left, 2 * ROWS)
        alone = q_rows <= ROWS
        kv_first = kv_loads
        for first in range(0, q_rows, ROWS):
            side = (first // ROWS + turn) % 2
            loads = q_loads1 if side == 1 else q_loads0
            slot = side * Q_STAGES + loads % Q_STAGES
            mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
            put(notes, NOTES * slot, (kv_length + BN - 1) // BN)
            put(notes, NOTES * slot + 1, (first + 2 * ROWS >= q_rows).to(gl.int32))
            put(notes, NOTES * slot + 2, q_row + q_left)
            put(notes, NOTES * slot + 3, BOUND - q_left + first)
            put(notes, NOTES * slot + 4, head)
            put(notes, NOTES * slot + 5, kv_first)
            put(notes, NOTES * slot + 6, 0)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            _load_rows(q_desc, head * q_head, q_row, q_left, first, q_full.index(slot), q_ring.index(slot))
            q_loads1 += side
            q_loads0 += 1 - side
            if alone:  # the other one rests: a tile without keys, all of whose rows are dropped
                loads = q_loads0 if side == 1 else q_loads1
                slot = (1 - side) * Q_STAGES + loads % Q_STAGES
                mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
                put(notes, NOTES * slot, 1)
                put(notes, NOTES * slot + 1, 0)
                put(notes, NOTES * slot + 2, q_row)
                put(notes, NOTES * slot + 3, BOUND)
                put(notes, NOTES * slot + 4, head)
                put(notes, NOTES * slot + 5, kv_first)
                put(notes, NOTES * slot + 6, 1)
                mbarrier.arrive(q_full.index(slot), count=1)
                q_loads1 += 1 - side
                q_loads0 += side
            if (first == ROWS) | alone:
                for start in range(0, gl.maximum(kv_length, 1), BN):
                    place = kv_loads % STAGES
                    phase = ((kv_loads // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(place), phase)
                    mbarrier.arrive(k_empty.index(place), count=1, pred=alone)  # for the one that takes no part
                    mbarrier.expect(k_full.index(place), k_desc.block_type.nbytes)
                    _load_rows(k_desc, head * k_head, kv_begin, kv_length, start, k_full.index(place),
                               k_ring.index(place))
                    mbarrier.wait(v_empty.index(place), phase)
                    mbarrier.arrive(v_empty.index(place), count=1, pred=alone)
                    mbarrier.expect(v_full.index(place), v_desc.block_type.nbytes)
                    _load_rows(v_desc, head * v_head, kv_begin, kv_length, start, v_full.index(place),
                               v_ring.index(place))
                    kv_loads += 1
        if alone:  # a barrier tells only two phases apart: who rested must not come to a place ahead of these
            for back in gl.static_range(STAGES):
                last = kv_loads - 1 - back
                mbarrier.wait(k_full.index(last % STAGES), (last // STAGES) & 1, pred=last >= 0)
                mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1, pred=last >= 0)
        turn += 1
        item = next_item
        q_row = next_q_row
        q_left = next_q_left
        kv_begin = next_begin
        kv_length = next_length
    for side in gl.static_range(2):
        loads = q_loads1 if side == 1 else q_loads0
        slot = side * Q_STAGES + loads % Q_STAGES
        mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
        put(notes, NOTES * slot, -1)
        put(notes, NOTES * slot + 5, 0)
        mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def consume(
    o_desc, scale, q_ring, k_ring, v_ring, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HALF: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr):
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    factor = 0.5 * scale if FOLD else 1.0
    FIRST: gl.constexpr = HALF * Q_STAGES
    mbarrier.wait(q_full.index(FIRST), 0)
    tiles = get(notes, NOTES * FIRST, 4)
    done = get(notes, NOTES * FIRST + 1, 4) != 0
    zero = tiles * 0  # a constant would have another type than what a loop carries
    base = get(notes, NOTES * FIRST + 5, 4)
    works = get(notes, NOTES * FIRST + 6, 4) == 0
    loads = zero
    j = zero
    live = tiles >= 0
    mbarrier.wait(k_full.index(base % STAGES), 0, pred=live & works)
    q_here = q_ring.index(FIRST)._reinterpret(dtype, [ROWS, D], q_layout)
    s = gl.zeros([ROWS, BN], gl.float32, s_layout)
    k = k_ring.index(base % STAGES)._reinterpret(dtype, [BN, D], kv_layout)
    s = warpgroup_mma(q_here, k.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(base % STAGES), count=1, pred=live & done)
    p = gl.convert_layout(_value(s, scale, ACT, FOLD).to(dtype), p_layout)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    leaving = zero > 0
    while live:
        last = j + 1 >= tiles
        frees = done
        place = (base + j) % STAGES
        phase = ((base + j) // STAGES) & 1
        slot = FIRST + loads % Q_STAGES
        used = j > 0
        worked = works
        j += 1
        if last:
            loads += 1
            j = zero
            ahead = FIRST + loads % Q_STAGES
            mbarrier.wait(q_full.index(ahead), (loads // Q_STAGES) & 1)
            tiles = get(notes, NOTES * ahead, 4)
            done = get(notes, NOTES * ahead + 1, 4) != 0
            base = get(notes, NOTES * ahead + 5, 4)
            works = get(notes, NOTES * ahead + 6, 4) == 0
        live = tiles >= 0
        place_ahead = (base + j) % STAGES
        mbarrier.wait(k_full.index(place_ahead), ((base + j) // STAGES) & 1, pred=live & works)
        q_next = q_ring.index(FIRST + loads % Q_STAGES)._reinterpret(dtype, [ROWS, D], q_layout)
        k = k_ring.index(place_ahead)._reinterpret(dtype, [BN, D], kv_layout)
        s = gl.zeros([ROWS, BN], gl.float32, s_layout)
        s = warpgroup_mma(q_next, k.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(place), phase, pred=worked)
        v = v_ring.index(place)._reinterpret(dtype, [BN, D], kv_layout)
        acc = warpgroup_mma(p, v, acc, use_acc=used, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if live & done:
            mbarrier.arrive(k_empty.index(place_ahead), count=1)
        if leaving:  # by now the tile before has left its place
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(FIRST + (loads - 1 - last.to(gl.int32)) % Q_STAGES), count=1)
        p_next = gl.convert_layout(_value(s, scale, ACT, FOLD).to(dtype), p_layout)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        if frees:
            mbarrier.arrive(v_empty.index(place), count=1)
        if last:
            # The queries were read for the last time: their place takes the output on its way out.
            o_row = get(notes, NOTES * slot + 2, 4)
            o_at = get(notes, NOTES * slot + 3, 4)
            o_head = get(notes, NOTES * slot + 4, 4)
            out = q_ring.index(slot)
            _meet()
            out._reinterpret(dtype, [ROWS, D], q_layout).store((acc * factor).to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [BOUND, o_row, o_at, o_head * D], out)
        leaving = last
        p = p_next
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "list_start", "out_elements"])
def forward(
    q_desc, k_desc, v_desc, o_desc, out, offsets, schedule, batch, list_start, out_elements, scale, H, q_head,
    k_head, v_head, ACT: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, RESIDENT: gl.constexpr, FOLD: gl.constexpr):
    """out [rows, H, D] contiguous. Grid: one block an SM; launched with 4 warps (the first consumer's)."""
    _zero_rows(out, gl.load(offsets + batch).to(gl.int64) * H * D, out_elements, 1024)
    count = gl.load(schedule + 2) if RESIDENT else gl.load(schedule)
    items = schedule + list_start
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES] + q_desc.block_type.shape, q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2 * Q_STAGES * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (consume, (o_desc, scale, q_ring, k_ring, v_ring, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   0, Q_STAGES, STAGES, BN, D, ACT, FOLD)),
        (consume, (o_desc, scale, q_ring, k_ring, v_ring, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   1, Q_STAGES, STAGES, BN, D, ACT, FOLD)),
        (produce, (q_desc, k_desc, v_desc, items, count * H, H, q_head, k_head, v_head, q_ring, k_ring, v_ring,
                   notes, q_full, q_empty, k_full, k_empty, v_full, v_empty, Q_STAGES, STAGES, BN, RESIDENT)),
    ], [4, 1], [240, 24])
