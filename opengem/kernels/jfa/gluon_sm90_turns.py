"""Who works on what and when in the Hopper backward, and the warps beside the products: tiles in, turns, sums of dq.

dq is summed in fp32 in a scratch buffer by several blocks, in turn: the blocks of a sample pass over its query tiles
in staggered order, and each tile has a counter of the blocks that have added to it. One warp waits for the block's
turn, another announces that the block is done. The first block of a tile stores, the next ones add, the last one adds
and writes dq. The order depends on the shape of the sample alone, so the bits do not depend on timing. The scratch
buffer holds a tile in the order of the registers: every thread reads and writes 16 bytes at a time.

No block waits for one that may never run: a queue taken in order, and turns that wait only for earlier items, or
(full attention, at most half as many blocks a sample as multiprocessors) for blocks of one sample that all fit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from opengem.kernels.jfa.gluon_sm90 import BOUND, get, load_rows, put

STARTS = gl.constexpr(1)  # the first tile of a block of keys, its last
ENDS = gl.constexpr(2)
FRESH = gl.constexpr(4)  # the first block, the last block to add to this tile of dq
LAST = gl.constexpr(8)
PAST = gl.constexpr(16)  # some keys are past the end of the sample, after or before what a query sees
AFTER = gl.constexpr(32)
BEFORE = gl.constexpr(64)
TURNS = gl.constexpr(2)  # turns awaited and not yet announced


# ---- who works on what, and when -----------------------------------------------------------------------------------


@gluon.jit
def _low(tile, gap, right, tiles, HAS_RIGHT: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """The first query tile that sees key tile `tile`; `gap` is keys less queries."""
    low = 0
    if HAS_RIGHT:
        low = gl.minimum(gl.maximum(tile * KEYS - right - gap, 0) // QUERIES, tiles)
    return low


@gluon.jit
def _high(tile, gap, left, tiles, HAS_LEFT: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """One past the last query tile that sees key tile `tile`."""
    high = tiles
    if HAS_LEFT:
        last = tile * KEYS + KEYS - 1 + left - gap
        high = gl.where(last < 0, 0, gl.minimum(gl.maximum(last, 0) // QUERIES + 1, tiles))
    return high


@gluon.jit
def _plan(
    item, records_ptr, slots, limit, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """(kv head, first key row, keys, key tile, first query row, queries, first query slot, low, high, begin)."""
    head = item // slots
    slot = item - head * slots
    k_begin = gl.load(records_ptr + slot)
    n = gl.load(records_ptr + slots + slot)
    tile = gl.load(records_ptr + 2 * slots + slot)
    q_begin = gl.load(records_ptr + 3 * slots + slot)
    m = gl.load(records_ptr + 4 * slots + slot)
    q_slot = gl.load(records_ptr + 5 * slots + slot)
    tiles = (m + QUERIES - 1) // QUERIES
    low = _low(tile, n - m, right, tiles, HAS_RIGHT, QUERIES, KEYS)
    high = _high(tile, n - m, left, tiles, HAS_LEFT, QUERIES, KEYS)
    begin = low
    if not HAS_LEFT and not HAS_RIGHT:
        owners = (n + KEYS - 1) // KEYS
        begin = gl.where(owners <= limit, tile * tiles // gl.maximum(owners, 1), 0)
    high = gl.where(tile >= 0, high, low)
    return head, k_begin, n, tile, q_begin, m, q_slot, low, high, begin


@gluon.jit
def _firsts_and_lasts(
    tile, n, m, low, high, begin, limit, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """(low, high) of the query tiles to which this block is the first to add, and of those to which it is the last."""
    gap = n - m
    owners = (n + KEYS - 1) // KEYS
    tiles = (m + QUERIES - 1) // QUERIES
    fresh_low = low
    fresh_high = high
    last_low = low
    last_high = high
    if HAS_RIGHT:  # noqa: SIM102 (a constant and a value of the kernel do not combine)
        if tile < owners - 1:
            fresh_high = _low(tile + 1, gap, right, tiles, HAS_RIGHT, QUERIES, KEYS)
    if HAS_LEFT:  # noqa: SIM102
        if tile > 0:
            last_low = _high(tile - 1, gap, left, tiles, HAS_LEFT, QUERIES, KEYS)
    if HAS_RIGHT and not HAS_LEFT:
        last_high = gl.where(tile == 0, high, 0)
    if HAS_LEFT and not HAS_RIGHT:
        fresh_high = gl.where(tile == owners - 1, high, 0)
    if not HAS_LEFT and not HAS_RIGHT:
        staggered = owners <= limit
        whole = gl.maximum(owners, 1)
        before = gl.where(tile == 0, owners - 1, tile - 1)
        fresh_low = gl.where(staggered, begin, 0)
        fresh_high = gl.where(staggered, (tile + 1) * tiles // whole, gl.where(tile == owners - 1, tiles, 0))
        last_low = gl.where(staggered, before * tiles // whole, 0)
        last_high = gl.where(staggered, (before + 1) * tiles // whole, gl.where(tile == 0, tiles, 0))
    return fresh_low, fresh_high, last_low, last_high


@gluon.jit
def _rank(
    query_tile, tile, n, m, limit, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr):
    """How many blocks add to the query tile before the owner of key tile `tile` does.

    Key tiles take turns from the last that sees the query tile downwards. Where all see all (and all blocks of a sample
    run at once) they start staggered and wrap round: from the last that has started by then, downwards, and then from
    the very last.
    """
    owners = (n + KEYS - 1) // KEYS
    if HAS_RIGHT:
        rank = gl.minimum(owners - 1, (query_tile * QUERIES + QUERIES - 1 + n - m + right) // KEYS) - tile
    else:
        rank = owners - 1 - tile
    if not HAS_LEFT and not HAS_RIGHT:
        tiles = (m + QUERIES - 1) // QUERIES
        started = ((query_tile + 1) * owners + tiles - 1) // tiles
        wrapped = gl.where(tile < started, started - 1 - tile, started + owners - 1 - tile)
        rank = gl.where(owners <= limit, wrapped, rank)
    return rank


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
def produce(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, records_ptr, k_ring, v_ring, q_ring, do_ring,
    stats_ring, notes, places, claims, kv_full, staged, q_full, do_full, empty, claimed, taken, slots, items, q_slots,
    limit, left, right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, DEALT: gl.constexpr):
    count = 0
    kv_count = 0
    claim_count = 0
    item = gl.program_id(0)
    while item < items:
        head, k_begin, n, tile, q_begin, m, q_slot, low, high, begin = _plan(
            item, records_ptr, slots, limit, left, right, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS)
        if high > low:
            kv = kv_count % 2
            mbarrier.wait(staged.index(kv), ((kv_count // 2) & 1) ^ 1)
            if kv_count >= 2:
                _write_back(kv, dk_desc, dv_desc, k_ring, v_ring, places)
            put(places, 4 * kv, k_begin + n)
            put(places, 4 * kv + 1, BOUND - n + tile * KEYS)
            put(places, 4 * kv + 2, head * HEAD_DIM)
            mbarrier.expect(kv_full.index(kv), 2 * k_desc.block_type.nbytes)
            load_rows(k_desc, k_begin, n, tile * KEYS, head * HEAD_DIM, kv_full.index(kv), k_ring.index(kv))
            load_rows(v_desc, k_begin, n, tile * KEYS, head * HEAD_DIM, kv_full.index(kv), v_ring.index(kv))
            kv_count += 1
            fresh_low, fresh_high, last_low, last_high = _firsts_and_lasts(
                tile, n, m, low, high, begin, limit, left, right, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS)
            for member in range(GROUP):
                q_head = head * GROUP + member
                for trip in range(high - low):
                    query_tile = begin + trip
                    query_tile = gl.where(query_tile >= high, query_tile - (high - low), query_tile)
                    first = query_tile * QUERIES + n - m - tile * KEYS  # position of the first query over the first key
                    fresh = (query_tile >= fresh_low) & (query_tile < fresh_high)
                    last = (query_tile >= last_low) & (query_tile < last_high)
                    starts = (trip == 0) & (member == 0)
                    ends = (trip == high - low - 1) & (member == GROUP - 1)
                    flags = gl.where(starts, STARTS, 0) + gl.where(ends, ENDS, 0)
                    flags += gl.where(fresh, FRESH, 0) + gl.where(last, LAST, 0)
                    flags += gl.where(n - tile * KEYS < KEYS, PAST, 0)
                    if HAS_RIGHT:
                        flags += gl.where(first + right < KEYS - 1, AFTER, 0)
                    if HAS_LEFT:
                        flags += gl.where(first + QUERIES - 1 > left, BEFORE, 0)
                    at = count % STAGES
                    mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                    put(notes, 8 * at, flags)
                    put(notes, 8 * at + 1, q_head * q_slots + q_slot + query_tile)
                    put(notes, 8 * at + 2, first)
                    put(notes, 8 * at + 3, n - tile * KEYS)
                    put(notes, 8 * at + 4, q_begin + query_tile * QUERIES)
                    put(notes, 8 * at + 5, m - query_tile * QUERIES)
                    put(notes, 8 * at + 6, q_head)
                    mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
                    load_rows(q_desc, q_begin, m, query_tile * QUERIES, q_head * HEAD_DIM, q_full.index(at),
                               q_ring.index(at))
                    tma.async_copy_global_to_shared(
                        stats_desc, [2 * (q_head * q_slots + q_slot + query_tile), 0], q_full.index(at),
                        stats_ring.index(at))
                    mbarrier.expect(do_full.index(at), do_desc.block_type.nbytes)
                    load_rows(do_desc, q_begin, m, query_tile * QUERIES, q_head * HEAD_DIM, do_full.index(at),
                               do_ring.index(at))
                    count += 1
        if DEALT:
            item += gl.num_programs(0)
        else:
            at = claim_count % 2
            mbarrier.wait(claimed.index(at), (claim_count // 2) & 1)
            item = get(claims, at, 1)
            mbarrier.arrive(taken.index(at), count=1)
            claim_count += 1
    at = count % STAGES
    mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
    put(notes, 8 * at, -1)
    mbarrier.arrive(q_full.index(at), count=1)
    left_over = gl.minimum(kv_count, 2)
    for back in range(left_over):
        block = kv_count - left_over + back
        mbarrier.wait(staged.index(block % 2), (block // 2) & 1)
        _write_back(block % 2, dk_desc, dv_desc, k_ring, v_ring, places)


@gluon.jit
def await_count(counter, rank):
    """Until the counter has come to `rank`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred behind;
        .reg .s32 value;
        again:
        ld.acquire.gpu.global.s32 value, [$1];
        setp.lt.s32 behind, value, $2;
        @behind bra again;
        mov.s32 $0, value;
        }""", "=r,l,r", [counter.to(gl.int64), rank], gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turns(
    counters_ptr, records_ptr, claims, orders, turn, done, told, claimed, taken, slots, items, q_slots, limit, left,
    right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, DEALT: gl.constexpr):
    count = 0
    claim_count = 0
    item = gl.program_id(0)
    while item < items:
        head, k_begin, n, tile, q_begin, m, q_slot, low, high, begin = _plan(
            item, records_ptr, slots, limit, left, right, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS)
        for member in range(GROUP):
            base = (head * GROUP + member) * q_slots + q_slot
            for trip in range(high - low):
                query_tile = begin + trip
                query_tile = gl.where(query_tile >= high, query_tile - (high - low), query_tile)
                rank = _rank(query_tile, tile, n, m, limit, right, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS)
                at = count % TURNS
                mbarrier.wait(told.index(at), ((count // TURNS) & 1) ^ 1)
                await_count(counters_ptr + base + query_tile, rank)
                put(orders, 2 * at, base + query_tile)
                put(orders, 2 * at + 1, rank + 1)
                mbarrier.arrive(turn.index(at), count=1)
                count += 1
        if DEALT:
            item += gl.num_programs(0)
        else:
            # No turn is left to wait for, so taking an item cannot keep others from theirs.
            item = gl.atomic_add(counters_ptr + items // slots * GROUP * q_slots, 1, sem="relaxed") + gl.num_programs(0)
            at = claim_count % 2
            mbarrier.wait(taken.index(at), ((claim_count // 2) & 1) ^ 1)
            put(claims, at, item)
            mbarrier.arrive(claimed.index(at), count=1)
            claim_count += 1
    at = count % TURNS
    mbarrier.wait(told.index(at), ((count // TURNS) & 1) ^ 1)
    put(orders, 2 * at, -1)
    mbarrier.arrive(done.index(at), count=1)


@gluon.jit
def tell(counters_ptr, orders, done, told, empty, STAGES: gl.constexpr, FREES: gl.constexpr):
    """Announce that the block has added to its tiles; FREES: that ends the work on a tile."""
    mbarrier.wait(done.index(0), 0)
    place = get(orders, 0, 1)
    count = 0
    while place >= 0:
        if FREES:
            mbarrier.arrive(empty.index(count % STAGES), count=1)
        at = count % TURNS
        gl.inline_asm_elementwise(
            """{
            fence.acq_rel.gpu;
            st.relaxed.gpu.global.s32 [$1], $2;
            mov.s32 $0, $2;
            }""", "=r,l,r", [(counters_ptr + place).to(gl.int64), get(orders, 2 * at + 1, 1)], gl.int32, is_pure=False,
            pack=1)
        mbarrier.arrive(told.index(at), count=1)
        count += 1
        at = count % TURNS
        mbarrier.wait(done.index(at), (count // TURNS) & 1)
        place = get(orders, 2 * at, 1)


@gluon.jit
def visible(
    p, flags, steps, notes, at, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, QUERIES: gl.constexpr):
    """`p`, 0 where a query does not see a key. Few tiles need a mask, and fewer more than one.

    The numbers 0, 1, 2, ... come from shared memory: of constants the compiler would keep dozens in registers.
    """
    keys: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    queries: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    if flags & PAST != 0:
        key = steps.load(keys)
        p = gl.where((key < get(notes, 8 * at + 3, 8))[:, None], p, 0.0)
    if HAS_RIGHT:  # noqa: SIM102 (a constant and a value of the kernel do not combine)
        if flags & AFTER != 0:
            key = steps.load(keys)
            last = steps.slice(0, QUERIES).load(queries) + (get(notes, 8 * at + 2, 8) + right)
            p = gl.where(key[:, None] <= last[None, :], p, 0.0)
    if HAS_LEFT:  # noqa: SIM102
        if flags & BEFORE != 0:
            key = steps.load(keys)
            first = steps.slice(0, QUERIES).load(queries) + (get(notes, 8 * at + 2, 8) - left)
            p = gl.where(key[:, None] >= first[None, :], p, 0.0)
    return p


# ---- sums of dq ----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _adding(values):
    """PTX that stores or adds `values` numbers of each thread: of operand $1 (what to do), $2 (where), $3 (what)."""
    operands = [f"${values // 4 + i * values}" for i in range(3)]
    parts = [f"[at + {1024 * i}], {{${base}, ${base + 1}, ${base + 2}, ${base + 3}}};"
             for i in range(0, values, 4) for base in [values // 4 + 2 * values + i]]
    return "\n".join([
        "{", ".reg .pred fresh, more;", ".reg .u32 thread;", ".reg .u64 at;", "mov.u32 thread, %tid.x;",
        f"mad.wide.u32 at, thread, 16, {operands[1]};", f"setp.eq.s32 fresh, {operands[0]}, 0;",
        f"setp.eq.s32 more, {operands[0]}, 1;", *(f"@fresh st.global.v4.f32 {part}" for part in parts),
        *(f"@more red.relaxed.gpu.global.add.v4.f32 {part}" for part in parts), "}"])


@gluon.constexpr_function
def _adding_operands(values):
    return ",".join(["=r"] * (values // 4) + ["r"] * values + ["l"] * values + ["f"] * values)


@gluon.constexpr_function
def _reading(values):
    return "\n".join([
        "{", ".reg .u32 thread;", ".reg .u64 at;", "mov.u32 thread, %tid.x;",
        f"mad.wide.u32 at, thread, 16, ${values};",
        *(f"ld.relaxed.gpu.global.v4.f32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [at + {1024 * i}];"
          for i in range(0, values, 4)), "}"])


@gluon.constexpr_function
def _reading_operands(values):
    return ",".join(["=&f"] * values + ["l"] * values + ["f"] * values)


@gluon.jit
def add_share(address, share, mode, VALUES: gl.constexpr):
    """Store (mode 0) or add (mode 1) the numbers that each of 256 threads has of `share`; mode 2 does nothing."""
    gl.inline_asm_elementwise(
        _adding(VALUES), _adding_operands(VALUES), [mode, address, share], gl.int8, is_pure=False, pack=VALUES)


@gluon.jit
def sum_so_far(address, share, VALUES: gl.constexpr):
    """What the blocks before have added, as `share` holds it."""
    return gl.inline_asm_elementwise(
        _reading(VALUES), _reading_operands(VALUES), [address, share], gl.float32, is_pure=False, pack=VALUES)


@gluon.jit
def store(base, tile, row, rows, column, stride, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [8, 1], [1, 0])
    own = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    address = (row + own).to(gl.int64)[:, None] * stride + columns[None, :]
    value = gl.convert_layout(tile.to(base.dtype.element_ty), layout)
    gl.store(base + address, value, mask=(own < rows)[:, None])
