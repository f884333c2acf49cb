"""Jagged flash attention forward for Hopper in Gluon: persistent, warp-specialised, fed by TMA.

Each thread block stays on its multiprocessor and takes items (128 query rows of one sample and head) from a queue, a
counter in memory, so that blocks end together whatever the lengths. One producer warp takes the items and streams Q, K
and V tiles into shared memory; two warpgroups of 64 rows each consume them. A consumer issues the scores of the next
tile before it waits for the current product with V, so its softmax runs beside the tensor cores. Key tiles are visited
from the last to the first: the ragged tile comes first, masks stay out of the loop over full tiles. What the items are
comes from a schedule made on the device (`_schedule_kernel`).

Tiles end with their sample: `ragged` descriptors read 0 behind it, so a neighbour's NaN stays with the neighbour.
"""

from __future__ import annotations

import functools

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.jfa import triton as portable
from opengem.kernels.jfa.reference import Options
from opengem.kernels.launch import aligned, described, launch, multiprocessors

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = 128  # query rows of an item: two consumers of 64
KEYS = 128  # key rows of a tile
NARROW_KEYS, NARROW = 64, 512  # at head_dim 128 under a window of at most so many keys: less of a tile is outside
RING_ROWS = {64: 512, 128: 256}  # K and V rows in flight, by head dimension
ITEMS = 2  # items in flight
BOUND = gl.constexpr(1 << 30)


# ---- schedule --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["total", "batch", "steps", "slots"])
def _schedule_kernel(
    records_ptr, q_offsets_ptr, kv_offsets_ptr, total, batch, steps, slots,
    BLOCK: tl.constexpr, ITEM_ROWS: tl.constexpr,
):
    """Five int32 a slot: first query row, query rows (0: no item), position of the first, first key row, keys."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(records_ptr + 5 * slots, 0, mask=tl.program_id(0) == 0)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + batch
    for _ in range(steps):
        middle = (low + high + 1) // 2
        start = tl.load(q_offsets_ptr + middle).to(tl.int64) // ITEM_ROWS + middle
        low = tl.where(start <= slot, middle, low)
        high = tl.where(start <= slot, high, middle - 1)
    real = low < batch  # slot `batch` stands for the rows behind the last offset, which have no keys
    q_begin = tl.load(q_offsets_ptr + low).to(tl.int64)
    q_end = tl.where(real, tl.load(q_offsets_ptr + low + 1, mask=real, other=0).to(tl.int64), total)
    k_begin = tl.load(kv_offsets_ptr + low).to(tl.int64)
    keys = tl.where(real, tl.load(kv_offsets_ptr + low + 1, mask=real, other=0).to(tl.int64) - k_begin, 0)
    first = (slot - q_begin // ITEM_ROWS - low) * ITEM_ROWS
    rows = tl.minimum(tl.maximum(q_end - q_begin - first, 0), ITEM_ROWS)
    live = slot < slots
    tl.store(records_ptr + slot, (q_begin + first).to(tl.int32), mask=live)
    tl.store(records_ptr + slots + slot, rows.to(tl.int32), mask=live)
    tl.store(records_ptr + 2 * slots + slot, (first + keys - (q_end - q_begin)).to(tl.int32), mask=live)
    tl.store(records_ptr + 3 * slots + slot, k_begin.to(tl.int32), mask=live)
    tl.store(records_ptr + 4 * slots + slot, keys.to(tl.int32), mask=live)


@gluon.jit
def _tiles(position, rows, n, left, right, KEYS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """(last, first, full_first, full_end) key tiles of an item; those of [full_first, full_end) need no mask."""
    first = 0
    full_first = 0
    high = n
    full_end = n // KEYS
    if HAS_LEFT:
        first = gl.maximum(position - left, 0) // KEYS
        full_first = (gl.maximum(position + rows - 1 - left, 0) + KEYS - 1) // KEYS
    if HAS_RIGHT:
        high = gl.minimum(n, gl.maximum(position + rows + right, 0))
        full_end = gl.minimum(full_end, gl.maximum(position + right + 1, 0) // KEYS)
    last = gl.maximum((high + KEYS - 1) // KEYS, first + 1) - 1
    full_first = gl.minimum(gl.maximum(full_first, first), last + 1)
    return last, first, full_first, gl.maximum(full_end, full_first)


# ---- producer --------------------------------------------------------------------------------------------------


@gluon.jit
def load_rows(desc, begin, length, row, column, barrier, target):
    """Rows from `row` on of the sample at [begin, begin + length), 0 past its end (see `ragged`)."""
    tma.async_copy_global_to_shared(desc, [BOUND, begin + length, BOUND - length + row, column], barrier, target)


@gluon.jit
def put(numbers, at, value):
    """Hand a number to the other warps; a barrier must follow. One warp calls this."""
    numbers.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def get(numbers, at, WARPS: gl.constexpr):
    """What `put` left; WARPS of the caller."""
    return gl.sum(numbers.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, numbers, q_ring, k_ring, v_ring, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, slots, heads, total_q, scale2, left, right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ITEMS: gl.constexpr):
    count = 0
    q_count = 0
    item = gl.atomic_add(records_ptr + 5 * slots, 1, sem="relaxed")
    while item < slots * heads:
        slot = item // heads
        head = item - slot * heads
        q_row = gl.load(records_ptr + slot)
        rows = gl.load(records_ptr + slots + slot)
        position = gl.load(records_ptr + 2 * slots + slot)
        k_row = gl.load(records_ptr + 3 * slots + slot)
        n = gl.load(records_ptr + 4 * slots + slot)
        item = gl.atomic_add(records_ptr + 5 * slots, 1, sem="relaxed")
        if rows > 0:
            last, first, full_first, full_end = _tiles(position, rows, n, left, right, KEYS, HAS_LEFT, HAS_RIGHT)
            q_slot = q_count % ITEMS
            mbarrier.wait(q_empty.index(q_slot), ((q_count // ITEMS) & 1) ^ 1)
            put(numbers, 8 * q_slot, head)
            put(numbers, 8 * q_slot + 1, q_row)
            put(numbers, 8 * q_slot + 2, rows)
            put(numbers, 8 * q_slot + 3, position)
            put(numbers, 8 * q_slot + 4, n)
            mbarrier.expect(q_full.index(q_slot), 2 * q_desc.block_type.nbytes)
            for part in gl.static_range(2):
                load_rows(q_desc, q_row, rows, 64 * part, head * HEAD_DIM, q_full.index(q_slot),
                          q_ring.index(2 * q_slot + part))
            q_count += 1
            column = (head // GROUP) * HEAD_DIM
            for back in range(last - first + 1):
                row = (last - back) * KEYS
                at = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1  # passes at once on the first trip round the ring
                mbarrier.wait(k_empty.index(at), phase)
                mbarrier.expect(k_full.index(at), k_desc.block_type.nbytes)
                load_rows(k_desc, k_row, n, row, column, k_full.index(at), k_ring.index(at))
                mbarrier.wait(v_empty.index(at), phase)
                mbarrier.expect(v_full.index(at), v_desc.block_type.nbytes)
                load_rows(v_desc, k_row, n, row, column, v_full.index(at), v_ring.index(at))
                count += 1
    q_slot = q_count % ITEMS
    mbarrier.wait(q_empty.index(q_slot), ((q_count // ITEMS) & 1) ^ 1)
    put(numbers, 8 * q_slot, -1)
    mbarrier.arrive(q_full.index(q_slot), count=1)


# ---- consumers -------------------------------------------------------------------------------------------------


@gluon.jit
def _softmax_step(
    s, row_max, row_sum, position, key, n, scale2, left, right, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """(p, new maximum, new sum, factor for what was summed before); `position` and `key` are index vectors."""
    if MASK:
        visible = (key < n)[None, :]
        if HAS_LEFT:
            visible = visible & (key[None, :] >= position[:, None] - left)
        if HAS_RIGHT:
            visible = visible & (key[None, :] <= position[:, None] + right)
        s = gl.where(visible, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale2)
    shift = new_max
    if MASK:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale2 - shift[:, None])
    alpha = gl.exp2(row_max - shift)
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def matrix(box, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The matrix in a box [1, 1, ROWS, HEAD_DIM]."""
    return box._reinterpret(
        box.dtype, [ROWS, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], box.dtype))


@gluon.jit
def _attend(
    tile, tiles, count, o, p, row_max, row_sum, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, position,
    step, n, scale2, left, right, MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr):
    """`tiles` tiles downwards from `tile`. On entry `p` is of tile `count - 1`, not yet multiplied with V."""
    for back in range(tiles):
        at = count % STAGES
        mbarrier.wait(k_full.index(at), (count // STAGES) & 1)
        zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
        k = matrix(k_ring.index(at), KEYS, HEAD_DIM)
        s_next = warpgroup_mma(q_tile, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        o_next = warpgroup_mma(p, matrix(v_ring.index(before), KEYS, HEAD_DIM), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(at), count=1)
        key = (tile - back) * KEYS + step
        weights, row_max, row_sum, alpha = _softmax_step(
            s, row_max, row_sum, position, key, n, scale2, left, right, MASK, HAS_LEFT, HAS_RIGHT)
        o, p = warpgroup_mma_wait(0, deps=[o_next, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(weights.to(p.dtype), P_LAYOUT)
        count += 1
    return count, o, p, row_max, row_sum


@gluon.jit
def _consume(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, numbers, q_ring, k_ring, v_ring, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, slots, heads, total_q, scale2, left, right, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ITEMS: gl.constexpr, HALF: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    own = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    step = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    count = 0
    q_count = 0
    mbarrier.wait(q_full.index(0), 0)
    head = get(numbers, 0, 4)
    while head >= 0:
        q_slot = q_count % ITEMS
        q_row = get(numbers, 8 * q_slot + 1, 4)
        rows = get(numbers, 8 * q_slot + 2, 4)
        position = get(numbers, 8 * q_slot + 3, 4)
        n = get(numbers, 8 * q_slot + 4, 4)
        last, first, full_first, full_end = _tiles(position, rows, n, left, right, KEYS, HAS_LEFT, HAS_RIGHT)
        q_tile = q_ring.index(2 * q_slot + HALF)._reinterpret(dtype, [64, HEAD_DIM], q_shared)
        at = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(k_full.index(at), phase)
        k = matrix(k_ring.index(at), KEYS, HEAD_DIM)
        s = gl.zeros([64, KEYS], gl.float32, s_layout)
        s = warpgroup_mma(q_tile, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(at), count=1)
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        weights, row_max, row_sum, alpha = _softmax_step(
            s, row_max, row_sum, position + own, last * KEYS + step, n, scale2, left, right, True, HAS_LEFT,
            HAS_RIGHT)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        o = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        count += 1
        if HAS_RIGHT:
            edge = gl.maximum(full_end, first)
            count, o, p, row_max, row_sum = _attend(
                last - 1, gl.maximum(last - edge, 0), count, o, p, row_max, row_sum, q_tile, k_ring, v_ring, k_full,
                k_empty, v_full, v_empty, position + own, step, n, scale2, left, right, True, HAS_LEFT, HAS_RIGHT,
                KEYS, HEAD_DIM, STAGES, s_layout, o_layout, p_layout)
        top = gl.minimum(last, full_end)
        count, o, p, row_max, row_sum = _attend(
            top - 1, gl.maximum(top - full_first, 0), count, o, p, row_max, row_sum, q_tile, k_ring, v_ring, k_full,
            k_empty, v_full, v_empty, position + own, step, n, scale2, left, right, False, HAS_LEFT, HAS_RIGHT,
            KEYS, HEAD_DIM, STAGES, s_layout, o_layout, p_layout)
        if HAS_LEFT:
            top = gl.minimum(last, full_first)
            count, o, p, row_max, row_sum = _attend(
                top - 1, gl.maximum(top - first, 0), count, o, p, row_max, row_sum, q_tile, k_ring, v_ring, k_full,
                k_empty, v_full, v_empty, position + own, step, n, scale2, left, right, True, HAS_LEFT, HAS_RIGHT,
                KEYS, HEAD_DIM, STAGES, s_layout, o_layout, p_layout)
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        q_count += 1
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        o = warpgroup_mma(p, matrix(v_ring.index(before), KEYS, HEAD_DIM), o, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        none = row_sum == 0.0
        inverse = gl.convert_layout(1.0 / gl.where(none, 1.0, row_sum), gl.SliceLayout(1, o_layout))
        lse = gl.where(none, float("-inf"), (row_max + gl.log2(row_sum)) / LOG2E)
        gl.store(lse_ptr + head.to(gl.int64) * total_q + q_row + own, lse, mask=own < rows)
        out = gl.convert_layout((o * inverse[:, None]).to(dtype), store_layout)
        own_row = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
        column = head * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, store_layout))
        address = (q_row + own_row).to(gl.int64)[:, None] * (heads * HEAD_DIM) + column[None, :]
        gl.store(out_ptr + address, out, mask=(own_row < rows)[:, None])
        mbarrier.wait(q_full.index(q_count % ITEMS), (q_count // ITEMS) & 1)
        head = get(numbers, 8 * (q_count % ITEMS), 4)


@gluon.jit(do_not_specialize=["slots", "heads", "total_q", "left", "right"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, slots, heads, total_q, scale2, left, right,
    GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, ITEMS: gl.constexpr):
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2 * ITEMS, 1, 1, 64, HEAD_DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], v_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [8 * ITEMS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ITEMS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    # The first function runs on the launch's own four warps; the producer warp is given a warpgroup's place.
    gl.warp_specialize([
        (_consume, (q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, numbers, q_ring, k_ring, v_ring, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, slots, heads, total_q, scale2, left, right, GROUP,
                    HAS_LEFT, HAS_RIGHT, HEAD_DIM, KEYS, STAGES, ITEMS, 0)),
        (_consume, (q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, numbers, q_ring, k_ring, v_ring, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, slots, heads, total_q, scale2, left, right, GROUP,
                    HAS_LEFT, HAS_RIGHT, HEAD_DIM, KEYS, STAGES, ITEMS, 1)),
        (_produce, (q_desc, k_desc, v_desc, out_ptr, lse_ptr, records_ptr, numbers, q_ring, k_ring, v_ring, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, slots, heads, total_q, scale2, left, right, GROUP,
                    HAS_LEFT, HAS_RIGHT, HEAD_DIM, KEYS, STAGES, ITEMS)),
    ], [4, 1], [240, 24])


# ---- launch ----------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`, for what `takes` says; everything else goes to the portable kernels."""
    if not takes(q, k, v, bias):
        return portable.forward(q, k, v, q_offsets, kv_offsets, bias, max_q, max_kv, options)
    total, heads, dim = q.shape
    key = _key(q, q_offsets, kv_offsets)
    records, slots = _schedule(total, q_offsets, kv_offsets, key)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    narrow = dim == 128 and min(options.left, options.right) >= 0 and options.left + options.right <= NARROW
    keys = NARROW_KEYS if narrow else KEYS
    launch(
        _forward_kernel, (min(multiprocessors(q.device), slots * heads), 1, 1), key,
        (ragged(q, 64), ragged(k, keys), ragged(v, keys), out, lse, records, slots, heads, total,
         options.scale * LOG2E.value, options.left, options.right),
        (heads // k.shape[1], options.left >= 0, options.right >= 0, dim, keys, RING_ROWS[dim] // keys, ITEMS))
    return out, lse


def _schedule(total: int, offsets: Tensor, partner_offsets: Tensor, key: tuple | None) -> tuple[Tensor, int]:
    """(records of the items of `total` rows, slots)."""
    batch = offsets.shape[0] - 1
    slots = total // ROWS + batch + 1
    records = torch.empty(5 * slots + 1, dtype=torch.int32, device=offsets.device)
    launch(
        _schedule_kernel, ((slots + 255) // 256, 1, 1), key,
        (records, offsets, partner_offsets, total, batch, batch.bit_length(), slots), (256, ROWS), warps=8)
    return records, slots


def _key(q: Tensor, q_offsets: Tensor, kv_offsets: Tensor) -> tuple | None:
    """For `launch`: of the rest, TMA takes only what is aligned, and its strides are no part of the kernel."""
    if not aligned(q_offsets, kv_offsets):
        return None
    return q.device, q.dtype, q_offsets.dtype, kv_offsets.dtype


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """No bias, head_dim 64 or 128, and rows TMA can read: heads side by side, 16-byte aligned, not empty."""
    if bias is not None or q.shape[2] not in RING_ROWS or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    for x in (q, k, v):
        row, head, element = x.stride()
        if element != 1 or head != x.shape[2] or row % 8 or not 0 < x.shape[0] < 2**31 - 256:
            return False
    return aligned(q, k, v)


def ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes [rows, D] of a head of `x` `[T, H, D]` that end with the sample; the coordinates set the bound of rows.

    Two leading dimensions of strides `2^34 - row` and `row` shift the base (64-bit addresses wrap) so that the row
    coordinate runs into BOUND exactly at the sample's end: TMA reads 0 and writes nothing from there on.
    """
    row, head, _ = x.stride()
    return described(_ragged(row, head, x.shape[1], x.shape[2], rows, x.dtype), x)


def plain(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes [rows, D] of `x` fp32 `[N, D]`, contiguous, that lie in shared memory as they do in memory."""
    return described(_plain(rows, x.shape[1]), x, shape=list(x.shape))


@functools.cache
def _ragged(row: int, head: int, heads: int, dim: int, rows: int, dtype: torch.dtype) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(
        [1, 1, rows, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(
        torch.empty(0, dtype=dtype), [0x7FFF0000, 0x7FFF0000, BOUND.value, (heads - 1) * head + dim],
        [2**34 - row, row, row, 1], [1, 1, rows, dim], layout)


@functools.cache
def _plain(rows: int, dim: int) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(0), [rows, dim], [dim, 1], [rows, dim], plain_layout())


def plain_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(0, 32, 2)
