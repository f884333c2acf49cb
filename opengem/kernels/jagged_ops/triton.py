"""Jagged copies and products on a GPU. A copy's program owns a tile of output rows and finds each row's source itself:
no index tensor is made, every byte is read once and written once. Rows are addressed in int64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import kind_of, launch

TILE = 8192  # elements a program of four warps copies: eight 16-byte accesses a thread
USE_TILE = 4096  # the same for sums of uses, which hold it in fp32
SUM_TILE = 8192  # the same for sums of samples, of which the next are under way
SUM_COLUMNS = 64  # of a sample's rows a program sums: narrow, so that long samples are spread over programs
SUM_STAGES = 3  # tiles under way
USES = 512  # uses of rows a program counts, places or ranks
COUNTS = ["rows", "batch", "steps", "length"]  # change from batch to batch: never part of what is compiled


@triton.jit
def samples_of(offsets, more_offsets, batch, steps, row, TWO: tl.constexpr):
    """The sample of each of `row`, by `steps` halvings; offsets are the sum of two arrays if `TWO`."""
    low = tl.zeros([row.shape[0]], tl.int32)
    high = low + batch
    for _ in range(steps):
        middle = (low + high) // 2
        start = tl.load(offsets + middle).to(tl.int64)
        if TWO:
            start += tl.load(more_offsets + middle).to(tl.int64)
        ours = start <= row
        low = tl.where(ours, middle, low)
        high = tl.where(ours, high, middle)
    return low


def steps_for(batch: int) -> int:
    """Halvings that single out one of `batch` samples."""
    return max(batch - 1, 0).bit_length()


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows int64, columns) of this program; column tiles run fastest."""
    blocks = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _copy(values, out, source, found, row, rows, column, width, fill):
    mask = found[:, None] & (column < width)[None, :]
    part = tl.load(values + source[:, None] * width + column[None, :], mask=mask, other=fill)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], part, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _to_padded(values, offsets, out, rows, length, width, fill, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    sample = tl.where(row < rows, row // length, 0)
    source = tl.load(offsets + sample).to(tl.int64) + row % length
    found = (row < rows) & (source < tl.load(offsets + sample + 1))
    _copy(values, out, source, found, row, rows, column, width, fill)


@triton.jit(do_not_specialize=COUNTS)
def _to_jagged(padded, offsets, out, rows, length, width, batch, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    sample = samples_of(offsets, offsets, batch, steps, row, False)
    slot = row - tl.load(offsets + sample)
    found = (row < rows) & (row < tl.load(offsets + batch)) & (slot < length)
    _copy(padded, out, sample.to(tl.int64) * length + slot, found, row, rows, column, width, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def _concat(left, right, left_offsets, right_offsets, out, rows, width, batch, steps,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    sample = samples_of(left_offsets, right_offsets, batch, steps, row, True)
    left_row = row - tl.load(right_offsets + sample)
    left_end = tl.load(left_offsets + sample + 1)
    live = (row < rows) & (row < tl.load(left_offsets + batch) + tl.load(right_offsets + batch))
    inside = (column < width)[None, :]
    from_left = (left_row < left_end) & live
    from_right = (left_row >= left_end) & live
    first = tl.load(left + left_row[:, None] * width + column[None, :], mask=from_left[:, None] & inside, other=0.0)
    right_row = row - left_end
    second = tl.load(right + right_row[:, None] * width + column[None, :], mask=from_right[:, None] & inside, other=0.0)
    part = tl.where(from_left[:, None], first, second)
    tl.store(out + row[:, None] * width + column[None, :], part, mask=(row < rows)[:, None] & inside)


@triton.jit(do_not_specialize=COUNTS)
def _split(values, mine, others, out, rows, width, batch, steps, LEFT: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    sample = samples_of(mine, mine, batch, steps, row, False)
    source = row + tl.load(others + sample + (0 if LEFT else 1))
    found = (row < rows) & (row < tl.load(mine + batch))
    _copy(values, out, source, found, row, rows, column, width, 0.0)


@triton.jit(do_not_specialize=[*COUNTS, "source_rows"])
def _gather(values, index, out, rows, source_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    source = tl.load(index + row, mask=row < rows, other=-1).to(tl.int64)
    found = (source >= 0) & (source < source_rows)
    _copy(values, out, source, found, row, rows, column, width, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def _broadcast_add(values, dense, offsets, out, rows, width, batch, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _tile(rows, width, ROWS, COLUMNS)
    sample = samples_of(offsets, offsets, batch, steps, row, False).to(tl.int64)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    live = mask & (row < tl.load(offsets + batch))[:, None]
    part = tl.load(values + row[:, None] * width + column[None, :], mask=mask).to(tl.float32)
    part += tl.load(dense + sample[:, None] * width + column[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * width + column[None, :], part.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _segment_sum(values, offsets, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    blocks = tl.cdiv(width, COLUMNS)
    segment = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(offsets + segment).to(tl.int64), tl.load(offsets + segment + 1).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        total += tl.load(values + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(total, 0)
    tl.store(out + segment * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["uses", "rows"])
def _count_uses(index, seen, arrival, uses, rows, USES: tl.constexpr):
    """For each row how often it is used and, above bit 32, the sum of its uses, that is the use where there is one; and
    for each use how many of its row came before it, in whatever order. `seen[rows]` is 1 if any row is used twice."""
    use = tl.program_id(0) * USES + tl.arange(0, USES)
    row = tl.load(index + use, mask=use < uses, other=-1)
    known = (row >= 0) & (row < rows)
    before = tl.atomic_add(seen + row, (use.to(tl.int64) << 32) + 1, mask=known, sem="relaxed").to(tl.int32)
    tl.store(arrival + use, before, mask=known)
    tl.store(seen + rows + tl.zeros_like(use), 1, mask=known & (before > 0))


@triton.jit(do_not_specialize=["rows"])
def _allot(seen, firsts, rows, ROWS: tl.constexpr):
    """A stretch of places for the uses of each row used more than once; which stretch, nothing depends on."""
    if tl.load(seen + rows) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(seen + row, mask=row < rows, other=0).to(tl.int32)
    count = tl.where(count > 1, count, 0)
    first = tl.atomic_add(seen + rows + 1, tl.sum(count, 0).to(tl.int64), sem="relaxed").to(tl.int32)
    tl.store(firsts + row, first + tl.cumsum(count, 0) - count, mask=row < rows)


@triton.jit(do_not_specialize=["uses", "rows"])
def _place_uses(index, firsts, seen, arrival, order, uses, rows, USES: tl.constexpr):
    """The uses of each row used more than once, in order of arrival."""
    if tl.load(seen + rows) == 0:
        return
    use = tl.program_id(0) * USES + tl.arange(0, USES)
    row = tl.load(index + use, mask=use < uses, other=-1)
    known = (row >= 0) & (row < rows)
    known = known & (tl.load(seen + row, mask=known, other=0).to(tl.int32) > 1)
    first = tl.load(firsts + row, mask=known)
    tl.store(order + first + tl.load(arrival + use, mask=known), use, mask=known)


@triton.jit(do_not_specialize=["uses", "rows"])
def _rank_uses(index, firsts, seen, order, ranked, uses, rows, USES: tl.constexpr):
    """The same with the uses of a row in their own order, so that no order of arrival decides a sum."""
    if tl.load(seen + rows) == 0:
        return
    use = tl.program_id(0) * USES + tl.arange(0, USES)
    row = tl.load(index + use, mask=use < uses, other=-1)
    known = (row >= 0) & (row < rows)
    count = tl.load(seen + row, mask=known, other=0).to(tl.int32)
    count = tl.where(count > 1, count, 0)
    first = tl.load(firsts + row, mask=count > 0, other=0)
    rank = tl.zeros([USES], tl.int32)
    for other in range(0, tl.max(count, 0)):
        rank += (tl.load(order + first + other, mask=other < count, other=0x7FFFFFFF) < use).to(tl.int32)
    tl.store(ranked + first + rank, use, mask=count > 0)


@triton.jit(do_not_specialize=COUNTS)
def _sum_uses(grad, ranked, firsts, seen, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row r of `out` is the sum of the rows of `grad` that are its uses, one after the other."""
    row, column = _tile(rows, width, ROWS, COLUMNS)
    word = tl.load(seen + row, mask=row < rows, other=0)
    count = word.to(tl.int32)
    first = tl.load(firsts + row, mask=count > 1, other=0)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    source = tl.where(count == 1, word >> 32, tl.load(ranked + first, mask=count > 1, other=-1))
    live = mask & (count > 0)[:, None]
    total = tl.load(grad + source[:, None] * width + column[None, :], mask=live, other=0.0).to(tl.float32)
    for use in range(1, tl.max(count, 0)):
        source = tl.load(ranked + first + use, mask=use < count, other=-1).to(tl.int64)
        live = mask & (source >= 0)[:, None]
        total += tl.load(grad + source[:, None] * width + column[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_tile(offsets, batch, rows, tile, BM: tl.constexpr):
    """(sample, rows, live, written) of a tile of `BM` rows; sample b owns tiles from `offsets[b] // BM + b` on.

    A search of 32 ways, one lane each: three dependent loads for a thousand samples, where halving takes ten. The last
    sample also writes zeros to rows behind the last offset.
    """
    low = tile * 0
    high = low + batch
    while high - low > 1:
        step = tl.cdiv(high - low, 32)
        probe = low + step * tl.arange(0, 32)
        inside = probe < high
        first_tile = tl.load(offsets + probe, mask=inside, other=0).to(tl.int64) // BM + probe
        ours = tl.sum((inside & (first_tile <= tile)).to(tl.int32), 0)
        low += step * tl.maximum(ours - 1, 0)
        high = tl.minimum(high, low + step)
    begin, end = tl.load(offsets + low).to(tl.int64), tl.load(offsets + low + 1).to(tl.int64)
    row = begin + (tile - begin // BM - low) * BM + tl.arange(0, BM)
    return low.to(tl.int64), row, row < end, row < tl.where(low == batch - 1, rows, end)


@triton.jit(do_not_specialize=["batch", "rows"])
def _bmm(values, dense, offsets, out, rows, batch, inner, columns, dense_batch, dense_inner, dense_column,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One `[BM, BN]` tile of `values[t] @ dense[b]`."""
    blocks = tl.cdiv(columns, BN)
    column = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    sample, row, live, written = _row_tile(offsets, batch, rows, tl.program_id(0) // blocks, BM)
    inside = column < columns
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inner, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(values + row[:, None] * inner + k[None, :], mask=live[:, None] & (k < inner)[None, :], other=0.0)
        weight = dense + sample * dense_batch + k[:, None] * dense_inner + column[None, :] * dense_column
        right = tl.load(weight, mask=(k < inner)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty),
             mask=written[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["batch", "rows"])
def _bmm_short(values, dense, offsets, out, rows, batch, inner, columns, dense_batch, dense_inner, dense_column,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """The same where `inner` fits `BK`: a program keeps its rows and takes all columns, the next under way."""
    sample, row, live, written = _row_tile(offsets, batch, rows, tl.program_id(0), BM)
    k = tl.arange(0, BK)
    left = tl.load(values + row[:, None] * inner + k[None, :], mask=live[:, None] & (k < inner)[None, :], other=0.0)
    for start in tl.range(0, columns, BN, num_stages=STAGES):
        column = start + tl.arange(0, BN)
        inside = column < columns
        weight = dense + sample * dense_batch + k[:, None] * dense_inner + column[None, :] * dense_column
        right = tl.load(weight, mask=(k < inner)[:, None] & inside[None, :], other=0.0)
        tl.store(out + row[:, None] * columns + column[None, :], tl.dot(left, right).to(out.dtype.element_ty),
                 mask=written[:, None] & inside[None, :])


@triton.jit
def _bmm_backward(grad, values, offsets, out, inner, columns, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One `[BK, BN]` tile of `values_b^T @ grad_b`."""
    column_blocks, inner_blocks = tl.cdiv(columns, BN), tl.cdiv(inner, BK)
    program = tl.program_id(0)
    column = program % column_blocks * BN + tl.arange(0, BN)
    k = program // column_blocks % inner_blocks * BK + tl.arange(0, BK)
    sample = (program // (column_blocks * inner_blocks)).to(tl.int64)
    start, end = tl.load(offsets + sample).to(tl.int64), tl.load(offsets + sample + 1).to(tl.int64)
    total = tl.zeros([BK, BN], tl.float32)
    for first in range(start, end, BM):
        row = first + tl.arange(0, BM)
        live = (row < end)[:, None]
        left_mask, right_mask = live & (k < inner)[None, :], live & (column < columns)[None, :]
        left = tl.load(values + row[:, None] * inner + k[None, :], mask=left_mask, other=0.0)
        right = tl.load(grad + row[:, None] * columns + column[None, :], mask=right_mask, other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    tl.store(out + (sample * inner + k)[:, None] * columns + column[None, :], total.to(out.dtype.element_ty),
             mask=(k < inner)[:, None] & (column < columns)[None, :])


def _copy_tiles(kernel, rows: int, width: int, tensors: tuple, numbers: tuple, constants: tuple = (),
                tile: int = TILE) -> None:
    """Launch a kernel over tiles of `rows` rows of `width` elements."""
    columns = min(triton.next_power_of_2(width), 1024)
    tile_rows = max(1, tile // columns)
    grid = triton.cdiv(rows, tile_rows) * triton.cdiv(width, columns)
    launch(kernel, (grid, 1, 1), kind_of(*tensors, facts=(width, rows >> 31)), (*tensors, rows, *numbers),
           (*constants, tile_rows, columns))


def _width(x: Tensor, rows: int) -> int:
    return x.numel() // rows if rows else 0


def jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float) -> Tensor:
    """See `reference.jagged_to_padded`."""
    out = values.new_empty((offsets.shape[0] - 1, max_length, *values.shape[1:]))
    if out.numel() == 0 or values.shape[0] == 0:
        return out.fill_(fill)
    width = values[0].numel()
    _copy_tiles(_to_padded, out.shape[0] * max_length, width, (values.contiguous(), offsets, out),
                (max_length, width, float(fill)))
    return out


def padded_to_jagged(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """See `reference.padded_to_jagged`."""
    out = padded.new_empty((rows, *padded.shape[2:]))
    if out.numel() == 0 or padded.numel() == 0:
        return out.zero_()
    batch, width = padded.shape[0], _width(out, rows)
    _copy_tiles(_to_jagged, rows, width, (padded.contiguous(), offsets, out),
                (padded.shape[1], width, batch, steps_for(batch)))
    return out


def concat_jagged(left: Tensor, right: Tensor, left_offsets: Tensor, right_offsets: Tensor) -> Tensor:
    """See `reference.concat_jagged`."""
    rows, batch = left.shape[0] + right.shape[0], left_offsets.shape[0] - 1
    out = left.new_empty((rows, *left.shape[1:]))
    if out.numel() == 0 or batch == 0:
        return out.zero_()
    width = _width(out, rows)
    _copy_tiles(_concat, rows, width, (left.contiguous(), right.contiguous(), left_offsets, right_offsets, out),
                (width, batch, steps_for(batch)))
    return out


def split_jagged(values: Tensor, left_offsets: Tensor, right_offsets: Tensor, left_rows: int) -> tuple[Tensor, Tensor]:
    """See `reference.split_jagged`."""
    batch, values, parts = left_offsets.shape[0] - 1, values.contiguous(), []
    for left, rows, mine, others in ((True, left_rows, left_offsets, right_offsets),
                                     (False, values.shape[0] - left_rows, right_offsets, left_offsets)):
        out = values.new_empty((rows, *values.shape[1:]))
        parts.append(out)
        if out.numel() == 0 or batch == 0:
            out.zero_()
            continue
        width = _width(out, rows)
        _copy_tiles(_split, rows, width, (values, mine, others, out), (width, batch, steps_for(batch)), (left,))
    return parts[0], parts[1]


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """See `reference.gather_rows`; an index outside the rows gives zeros."""
    rows = index.shape[0]
    out = values.new_empty((rows, *values.shape[1:]))
    if out.numel() == 0 or values.shape[0] == 0:
        return out.zero_()
    width = _width(out, rows)
    _copy_tiles(_gather, rows, width, (values.contiguous(), index.contiguous(), out), (values.shape[0], width))
    return out


def gather_rows_backward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """See `reference.gather_rows_backward`. Uses are counted and placed, not sorted, and where no row has two of them,
    which only the GPU knows, not even placed: those launches end at once."""
    out, uses = grad.new_empty((rows, *grad.shape[1:])), index.shape[0]
    if out.numel() == 0 or uses == 0:
        return out.zero_()
    index, width = index.contiguous(), _width(out, rows)
    seen = torch.zeros(rows + 2, dtype=torch.int64, device=grad.device)  # and: is any used twice, places given so far
    firsts = torch.empty(rows, dtype=torch.int32, device=grad.device)
    arrival, order, ranked = (torch.empty(uses, dtype=torch.int32, device=grad.device) for _ in range(3))
    grid, key = (triton.cdiv(uses, USES), 1, 1), kind_of(index, arrival, order, ranked)
    launch(_count_uses, grid, key, (index, seen, arrival, uses, rows), (USES,))
    launch(_allot, (triton.cdiv(rows, 1024), 1, 1), kind_of(firsts), (seen, firsts, rows), (1024,))
    launch(_place_uses, grid, key, (index, firsts, seen, arrival, order, uses, rows), (USES,))
    launch(_rank_uses, grid, key, (index, firsts, seen, order, ranked, uses, rows), (USES,))
    _copy_tiles(_sum_uses, rows, width, (grad.contiguous(), ranked, firsts, seen, out), (width,), tile=USE_TILE)
    return out


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """See `reference.segment_sum`."""
    segments = offsets.shape[0] - 1
    out = values.new_empty((segments, *values.shape[1:]))
    if out.numel() == 0 or values.shape[0] == 0:
        return out.zero_()
    values, width = values.contiguous(), _width(out, segments)
    columns = min(triton.next_power_of_2(width), SUM_COLUMNS)
    launch(_segment_sum, (segments * triton.cdiv(width, columns), 1, 1), kind_of(values, offsets, facts=(width,)),
           (values, offsets, out, width), (SUM_TILE // columns, columns, SUM_STAGES))
    return out


def broadcast_add(values: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    """See `reference.broadcast_add`."""
    rows, batch = values.shape[0], offsets.shape[0] - 1
    if values.numel() == 0 or batch == 0:
        return values.clone(memory_format=torch.contiguous_format)
    out = values.new_empty(values.shape)
    width = _width(out, rows)
    _copy_tiles(_broadcast_add, rows, width, (values.contiguous(), dense.contiguous(), offsets, out),
                (width, batch, steps_for(batch)))
    return out


def _product_tile(size: int) -> int:
    """Side of a product's tile: as wide as fits, because the other operand is read once for each tile."""
    return 64 if size <= 64 else 128


def jagged_dense_bmm(values: Tensor, dense: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """See `reference.jagged_dense_bmm`."""
    rows, (batch, inner, columns) = values.shape[0], dense.shape
    out = values.new_empty(rows, columns)
    if out.numel() == 0 or batch == 0 or inner == 0:
        return out.zero_()
    bm, bn, values = 128, _product_tile(columns), values.contiguous()
    tiles, blocks = rows // bm + batch, triton.cdiv(columns, bn)
    key = kind_of(values, dense, offsets, facts=(inner, columns, *dense.stride()))
    arguments = values, dense, offsets, out, rows, batch, inner, columns, *dense.stride()
    if inner <= 128 and blocks > 1:
        launch(_bmm_short, (tiles, 1, 1), key, arguments, (bm, 64, _product_tile(inner), 3), warps=8)
    else:
        launch(_bmm, (tiles * blocks, 1, 1), key, arguments, (bm, bn, 64), warps=8)
    return out


def jagged_dense_bmm_backward(grad: Tensor, values: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """See `reference.jagged_dense_bmm_backward`."""
    batch, inner, columns = offsets.shape[0] - 1, values.shape[1], grad.shape[1]
    out = values.new_empty(batch, inner, columns)
    if out.numel() == 0 or values.shape[0] == 0:
        return out.zero_()
    bn, bk, grad, values = _product_tile(columns), _product_tile(inner), grad.contiguous(), values.contiguous()
    launch(_bmm_backward, (batch * triton.cdiv(columns, bn) * triton.cdiv(inner, bk), 1, 1),
           kind_of(grad, values, offsets, facts=(inner, columns)), (grad, values, offsets, out, inner, columns),
           (64, bn, bk), warps=8)
    return out
