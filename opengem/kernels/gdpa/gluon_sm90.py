"""GDPA for Hopper (sm_90) in Gluon: persistent, warp-specialised, fed by TMA. Computes what the wide kernels do.

One thread block an SM: a producer warp loads tiles, two consumer warpgroups own 64 query rows each. A consumer walks
its (query tile, key tile) pairs as one flat list, across items: S of the next pair is issued before P V of this one and
the activation of the next runs beside it, so the pipeline never drains. Where FOLD, `s + s tanh(..)` leaves the factor
scale / 2 of gelu_tanh and silu to the output: 5.5 instructions a score in place of 8.

With few keys (RESIDENT) an item is a whole sample: K and V stay in shared memory while its query tiles, dealt to the
warpgroups in turn, pass by. Otherwise an item is 128 query rows and K, V stream through the same ring; with TURNS a
warpgroup issues its products when the other has issued its own, so that one multiplies while the other activates.

Tiles never cross a sample's end: descriptors are ragged (`jfa/gluon_sm90.py`), so TMA fills with 0 when loading and
drops rows when storing. A row past a sample's keys is 0, and so are its score and its weight: nothing is masked, and a
neighbour's NaN stays with the neighbour.
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
from opengem.kernels.jfa.gluon_sm90 import BOUND, load_rows

ROWS = gl.constexpr(64)  # query rows of a consumer warpgroup
Q_STAGES = gl.constexpr(3)  # tiles of queries, or of output on its way out, of each consumer of the forward
NOTES = gl.constexpr(8)  # numbers that come with a tile of queries
TANH_A = gl.constexpr(shared.TANH_A.value)
TANH_AB = gl.constexpr(shared.TANH_AB.value)
_tanh = gluon.jit(shared._tanh.fn)
_meet = getattr(gl, "barrier", None) or gl.thread_barrier  # of a partition's threads; renamed in Triton 3.7
act_value = gluon.jit(shared.act_value.fn)
act_both = gluon.jit(shared.act_both.fn)


@gluon.jit
def _rounds(items):
    """How many items this block takes: dealt zigzag, so that early (long) and late (short) ones even out."""
    blocks = gl.num_programs(0)
    full = items // blocks
    place = gl.program_id(0)
    if full % 2 == 1:
        place = blocks - 1 - place
    return full + (place < items % blocks).to(gl.int32)


@gluon.jit
def _record(schedule, turn, H):
    """(head, first query row, query rows left, first key, keys) of this block's `turn`-th item."""
    blocks = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = blocks - 1 - place
    item = turn * blocks + place
    entry = schedule + 4 * (item // H)
    return item % H, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def _dealt(turn, rounds, H, MIXED: gl.constexpr):
    """This block's `turn`-th item of `rounds`, dealt zigzag.

    Where MIXED each H blocks, which take the heads of one sample, begin at another place of their list, so that long
    items, bound by products, and short ones, bound by memory, run side by side.
    """
    blocks = gl.num_programs(0)
    place = gl.program_id(0)
    if MIXED:
        turn += rounds * (place // H) // gl.cdiv(blocks, H)
        turn -= gl.where(turn >= rounds, rounds, 0)
    if turn % 2 == 1:
        place = blocks - 1 - place
    return turn * blocks + place


@gluon.jit
def _ahead(schedule, item, items, H):
    """(first query row, query rows left, first key, keys) of an item, read ahead; zeros past the last."""
    entry = schedule + 4 * (item // H)
    live = item < items
    return (gl.load(entry, mask=live, other=0), gl.load(entry + 1, mask=live, other=0),
            gl.load(entry + 2, mask=live, other=0), gl.load(entry + 3, mask=live, other=0))


@gluon.jit
def _zero_rows(out, begin, end, WIDTH: gl.constexpr):
    """Set elements [begin, end) to 0, all blocks together."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, WIDTH, layout)
    zero = gl.zeros([WIDTH], out.dtype.element_ty, layout)
    for start in range(begin + gl.program_id(0) * WIDTH, end, gl.num_programs(0) * WIDTH):
        gl.store(out + start + lanes, zero, mask=lanes < end - start)


# ---- forward ------------------------------------------------------------------------------------------------------


@gluon.jit
def _value(s, scale, ACT: gl.constexpr, FOLD: gl.constexpr):
    if FOLD:
        if ACT == "silu":
            return s + s * _tanh(s * (0.5 * scale), True)
        else:
            a = TANH_A * scale
            b = TANH_AB * scale * scale * scale
            return s + s * _tanh(s * (a + b * (s * s)), True)
    else:
        return act_value(s * scale, ACT, True)


@gluon.jit
def _item(schedule, turn, rounds, H, MIXED: gl.constexpr):
    """(head, first query row, query rows left, first key, keys) of this block's `turn`-th item; none past the last."""
    item = _dealt(turn, rounds, H, MIXED)
    entry = schedule + 4 * (item // H)
    live = turn < rounds
    return (item % H, gl.load(entry, mask=live, other=0), gl.load(entry + 1, mask=live, other=0),
            gl.load(entry + 2, mask=live, other=0), gl.load(entry + 3, mask=live, other=0))


@gluon.jit
def _next_item(schedule, turn, rounds, H, MIXED: gl.constexpr):
    """The next item that has queries."""
    turn += 1
    head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H, MIXED)
    while (turn < rounds) & (q_left == 0):
        turn += 1
        head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H, MIXED)
    return turn, head, q_row, q_left, kv_length


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, schedule, count, H, q_head, k_head, v_head, q_ring, k_ring, v_ring, q_full, q_empty,
    k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr, BN: gl.constexpr, RESIDENT: gl.constexpr):
    q_loads0 = 0
    q_loads1 = 0
    kv_loads = 0
    rounds = _rounds(count * H)
    for turn in range(0, rounds):
        head, q_row, q_left, kv_begin, kv_length = _item(schedule, turn, rounds, H, RESIDENT)
        q_rows = q_left if RESIDENT else gl.minimum(q_left, 2 * ROWS)
        q_end = gl.where(q_rows > 0, gl.maximum(q_rows, 2 * ROWS), 0)  # each warpgroup takes part in every item
        for first in range(0, q_end, ROWS):
            side = (first // ROWS + turn) % 2
            loads = q_loads1 if side == 1 else q_loads0
            slot = side * Q_STAGES + loads % Q_STAGES
            mbarrier.wait(q_empty.index(slot), ((loads // Q_STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            load_rows(q_desc, q_row, q_left, first, head * q_head, q_full.index(slot), q_ring.index(slot))
            q_loads1 += side
            q_loads0 += 1 - side
            if first == ROWS:
                for start in range(0, gl.maximum(kv_length, 1), BN):
                    place = kv_loads % STAGES
                    phase = ((kv_loads // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(place), phase)
                    mbarrier.expect(k_full.index(place), k_desc.block_type.nbytes)
                    load_rows(k_desc, kv_begin, kv_length, start, head * k_head, k_full.index(place),
                              k_ring.index(place))
                    mbarrier.wait(v_empty.index(place), phase)
                    mbarrier.expect(v_full.index(place), v_desc.block_type.nbytes)
                    load_rows(v_desc, kv_begin, kv_length, start, head * v_head, v_full.index(place),
                              v_ring.index(place))
                    kv_loads += 1


@gluon.jit
def consume(
    o_desc, schedule, count, H, scale, q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, go,
    HALF: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr,
    RESIDENT: gl.constexpr, FOLD: gl.constexpr, TURNS: gl.constexpr):
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    factor = 0.5 * scale if FOLD else 1.0
    rounds = _rounds(count * H)
    zero = rounds * 0  # a constant would have another type than what a loop carries
    turn, head, q_row, q_left, kv_length = _next_item(schedule, zero - 1, rounds, H, RESIDENT)
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
                turn, head, q_row, q_left, kv_length = _next_item(schedule, turn, rounds, H, RESIDENT)
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
    RESIDENT: gl.constexpr, FOLD: gl.constexpr, TURNS: gl.constexpr):
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
    go = q_full  # a barrier that is made and not used would lose its place to other data, and may spoil it
    if TURNS:
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
                   v_empty, go, 0, STAGES, BN, D, ACT, RESIDENT, FOLD, TURNS)),
        (consume, (o_desc, items, count, H, scale, q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, go, 1, STAGES, BN, D, ACT, RESIDENT, FOLD, TURNS)),
        (produce, (q_desc, k_desc, v_desc, items, count, H, q_head, k_head, v_head, q_ring, k_ring, v_ring, q_full,
                   q_empty, k_full, k_empty, v_full, v_empty, STAGES, BN, RESIDENT)),
    ], [4, 1], [240, 24])


# ---- backward: rows stay, the other side streams -----------------------------------------------------------------
# dq:       a = (q, dout) stays, b = (k, v) streams:  s = a1 b1^T,  dp = a2 b2^T,  dq += ds b1
# dk, dv:   a = (k, v) stays, b = (q, dout) streams:  the same with everything transposed, and  dv += p^T b2 (KEYS)


@gluon.jit
def produce_pairs(
    a1_desc, a2_desc, b1_desc, b2_desc, schedule, count, H, a1_head, a2_head, b1_head, b2_head, a1_ring, a2_ring,
    b1_ring, b2_ring, a_full, a_empty, b1_full, b2_full, b_empty, STAGES: gl.constexpr, BN: gl.constexpr,
):
    loads = 0
    for turn in range(0, _rounds(count * H)):
        head, row, left, begin, length = _record(schedule, turn, H)
        mbarrier.wait(a_empty, (turn & 1) ^ 1)
        mbarrier.expect(a_full, 4 * a1_desc.block_type.nbytes)
        for half in gl.static_range(2):
            load_rows(a1_desc, row, left, half * ROWS, head * a1_head, a_full, a1_ring.index(half))
            load_rows(a2_desc, row, left, half * ROWS, head * a2_head, a_full, a2_ring.index(half))
        for start in range(0, gl.maximum(length, 1), BN):
            place = loads % STAGES
            mbarrier.wait(b_empty.index(place), ((loads // STAGES) & 1) ^ 1)
            mbarrier.expect(b1_full.index(place), b1_desc.block_type.nbytes)
            load_rows(b1_desc, begin, length, start, head * b1_head, b1_full.index(place), b1_ring.index(place))
            mbarrier.expect(b2_full.index(place), b2_desc.block_type.nbytes)
            load_rows(b2_desc, begin, length, start, head * b2_head, b2_full.index(place), b2_ring.index(place))
            loads += 1


@gluon.jit
def consume_pairs(
    o1_desc, o2_desc, schedule, count, H, scale, a1_ring, a2_ring, b1_ring, b2_ring, a_full, a_empty, b1_full,
    b2_full, b_empty, HALF: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr,
    KEYS: gl.constexpr):
    dtype: gl.constexpr = a1_ring.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    a1 = a1_ring.index(HALF)._reinterpret(dtype, [ROWS, D], a_layout)
    a2 = a2_ring.index(HALF)._reinterpret(dtype, [ROWS, D], a_layout)
    loads = 0
    for turn in range(0, _rounds(count * H)):
        head, row, left, begin, length = _record(schedule, turn, H)
        mbarrier.wait(a_full, turn & 1)
        acc1 = gl.zeros([ROWS, D], gl.float32, o_layout)
        acc2 = gl.zeros([ROWS, D], gl.float32, o_layout)
        for _ in range(0, gl.maximum(length, 1), BN):
            place = loads % STAGES
            phase = (loads // STAGES) & 1
            b1 = b1_ring.index(place)._reinterpret(dtype, [BN, D], b_layout)
            b2 = b2_ring.index(place)._reinterpret(dtype, [BN, D], b_layout)
            mbarrier.wait(b1_full.index(place), phase)
            s = gl.zeros([ROWS, BN], gl.float32, s_layout)
            s = warpgroup_mma(a1, b1.permute((1, 0)), s, use_acc=False, is_async=True)
            mbarrier.wait(b2_full.index(place), phase)
            dp = gl.zeros([ROWS, BN], gl.float32, s_layout)
            dp = warpgroup_mma(a2, b2.permute((1, 0)), dp, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            value, slope = act_both(s * scale, ACT, True)
            if KEYS:
                p = gl.convert_layout(value.to(dtype), p_layout)
                dp = warpgroup_mma_wait(0, deps=[dp])
                acc2 = warpgroup_mma(p, b2, acc2, is_async=True)
                ds = gl.convert_layout((dp * slope).to(dtype), p_layout)
                acc1 = warpgroup_mma(ds, b1, acc1, is_async=True)
                acc1, acc2, p, ds = warpgroup_mma_wait(0, deps=[acc1, acc2, p, ds])
            else:
                dp = warpgroup_mma_wait(0, deps=[dp])
                ds = gl.convert_layout((dp * slope).to(dtype), p_layout)
                acc1 = warpgroup_mma(ds, b1, acc1, is_async=True)
                acc1, ds = warpgroup_mma_wait(0, deps=[acc1, ds])
            mbarrier.arrive(b_empty.index(place), count=1)
            loads += 1
        # The rows that stayed were read for the last time: their place takes the gradients on their way out.
        a1.store((acc1 * scale).to(dtype))
        if KEYS:
            a2.store(acc2.to(dtype))
        fence_async_shared()
        at = BOUND - left + HALF * ROWS
        tma.async_copy_shared_to_global(o1_desc, [BOUND, row + left, at, head * D], a1_ring.index(HALF))
        if KEYS:
            tma.async_copy_shared_to_global(o2_desc, [BOUND, row + left, at, head * D], a2_ring.index(HALF))
        tma.store_wait(0)
        mbarrier.arrive(a_empty, count=1)


@gluon.jit(do_not_specialize=["batch", "list_start", "out_elements"])
def backward(
    a1_desc, a2_desc, b1_desc, b2_desc, o1_desc, o2_desc, o1, o2, offsets, schedule, batch, list_start, out_elements,
    scale, H, a1_head, a2_head, b1_head, b2_head, ACT: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, KEYS: gl.constexpr):
    """o1 (and o2 if KEYS) [rows, H, D] contiguous: dq, or dk and dv. Grid and warps as `forward`."""
    begin = gl.load(offsets + batch).to(gl.int64) * H * D
    _zero_rows(o1, begin, out_elements, 1024)
    if KEYS:
        _zero_rows(o2, begin, out_elements, 1024)
    count = gl.load(schedule + 1) if KEYS else gl.load(schedule)
    items = schedule + list_start
    a1_ring = gl.allocate_shared_memory(a1_desc.dtype, [2] + a1_desc.block_type.shape, a1_desc.layout)
    a2_ring = gl.allocate_shared_memory(a2_desc.dtype, [2] + a2_desc.block_type.shape, a2_desc.layout)
    b1_ring = gl.allocate_shared_memory(b1_desc.dtype, [STAGES] + b1_desc.block_type.shape, b1_desc.layout)
    b2_ring = gl.allocate_shared_memory(b2_desc.dtype, [STAGES] + b2_desc.block_type.shape, b2_desc.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    b1_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b2_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(a_full, count=1)
    mbarrier.init(a_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(b1_full.index(i), count=1)
        mbarrier.init(b2_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=2)
    gl.warp_specialize([
        (consume_pairs, (o1_desc, o2_desc, items, count, H, scale, a1_ring, a2_ring, b1_ring, b2_ring, a_full, a_empty,
                         b1_full, b2_full, b_empty, 0, STAGES, BN, D, ACT, KEYS)),
        (consume_pairs, (o1_desc, o2_desc, items, count, H, scale, a1_ring, a2_ring, b1_ring, b2_ring, a_full, a_empty,
                         b1_full, b2_full, b_empty, 1, STAGES, BN, D, ACT, KEYS)),
        (produce_pairs, (a1_desc, a2_desc, b1_desc, b2_desc, items, count, H, a1_head, a2_head, b1_head, b2_head,
                         a1_ring, a2_ring, b1_ring, b2_ring, a_full, a_empty, b1_full, b2_full, b_empty, STAGES, BN)),
    ], [4, 1], [240, 24])
