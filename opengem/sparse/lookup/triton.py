"""Triton kernels of the table-batched lookup and of the fused, deterministic update.

Update: row numbers are sorted; equal rows form a segment. Segments are cut at every multiple of CUT positions, so one
hot row cannot hold up a program. Ids follow a power law: most pieces are of one position, yet most positions lie in
pieces of many. Pieces up to SHORT are reduced a tile at a time, the longer ones each over a tile of its positions. A
piece that is a whole segment updates its row in place; the others leave a partial sum, and a third kernel adds those up
in order of position. No atomics: the same input gives the same bits. All row addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import multiprocessors

CUT = 128  # positions after which a segment is cut
SHORT = 4  # longest piece that is reduced together with others


# ---- noise and rounding, bit for bit those of opengem.sparse.noise --------------------------------------------


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stochastic_round(x, noise, HALF: tl.constexpr):
    """float32 -> float32 values that float16 (HALF) or bfloat16 holds exactly; the top bits of `noise` are used."""
    dropped: tl.constexpr = 13 if HALF else 16
    draw = (noise >> (32 - dropped)).to(tl.int32)
    keep: tl.constexpr = -(1 << dropped)
    if HALF:
        size = tl.abs(x)
        lift = tl.where(size < 0.00006103515625, 0.00006103515625, 0.0)  # below 2^-14 float16 has fixed steps of 2^-24
        raised = (((size + lift).to(tl.int32, bitcast=True) + draw) & keep).to(tl.float32, bitcast=True) - lift
        raised = tl.where(raised > 65504.0, 65504.0, raised).to(tl.int32, bitcast=True)
        return (raised | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    return ((x.to(tl.int32, bitcast=True) + draw) & keep).to(tl.float32, bitcast=True)


@triton.jit
def _noise(row, column, run_starts, run_shifts, key, num_runs, SEARCH: tl.constexpr):
    """uint32 [S, D]: the noise of elements of rows [S]; which run a row lies in is found by bisection."""
    low = tl.zeros_like(row)
    high = low + num_runs
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        below = (tl.load(run_starts + middle) <= row) & (high - low > 1)
        high = tl.where(below, high, tl.maximum(middle, low + 1))
        low = tl.where(below, middle, low)
    row += tl.load(run_shifts + low)
    drawn = _mix(row.to(tl.uint32) ^ _mix((row >> 32).to(tl.uint32) ^ key.to(tl.uint32)))
    x = drawn[:, None] + (column.to(tl.uint32) * 0x9E3779B9)[None, :]
    return (x ^ (x >> 16)) * 0x7FEB352D


# ---- forward --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["bags_per_feature"])
def lookup_pooled_kernel(
    weight, ids, offsets, first_rows, sample_weights, out, bags_per_feature,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One bag a program: out[bag] = sum over its ids of weight[first_rows[feature] + id], float32 inside."""
    bag = tl.program_id(0).to(tl.int64)
    first_row = tl.load(first_rows + bag // bags_per_feature)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    column = tl.arange(0, BLOCK_D)
    live_column = column < DIM
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin, end, ROWS):
        position = start + tl.arange(0, ROWS)
        live = position < end
        row = first_row + tl.load(ids + position, mask=live, other=0)
        address = row[:, None] * DIM + column[None, :]
        found = tl.load(weight + address, mask=live[:, None] & live_column[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            found *= tl.load(sample_weights + position, mask=live, other=0.0)[:, None]
        acc += found
    pooled = tl.sum(acc, axis=0)
    if MEAN:
        pooled /= tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out + bag * DIM + column, pooled.to(out.dtype.element_ty), mask=live_column)


@triton.jit(do_not_specialize=["bags_per_feature"])
def lookup_rows_kernel(
    weight, ids, offsets, first_rows, out, bags_per_feature,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One bag a program: out[p] = weight[first_rows[feature] + ids[p]] for each position p of the bag."""
    bag = tl.program_id(0).to(tl.int64)
    first_row = tl.load(first_rows + bag // bags_per_feature)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    column = tl.arange(0, BLOCK_D)
    for start in range(begin, end, ROWS):
        position = start + tl.arange(0, ROWS)
        live = position < end
        row = first_row + tl.load(ids + position, mask=live, other=0)
        mask = live[:, None] & (column < DIM)[None, :]
        found = tl.load(weight + row[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        address = position.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(out + address, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bags_per_feature"])
def lookup_positions_kernel(
    weight, ids, offsets, first_rows, out, bags_per_feature,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A stretch of the positions of one feature a program: out[p] = weight[first_rows[feature] + ids[p]]."""
    feature = tl.program_id(1).to(tl.int64)
    first_row = tl.load(first_rows + feature)
    begin = tl.load(offsets + feature * bags_per_feature)
    end = tl.load(offsets + (feature + 1) * bags_per_feature)
    column = tl.arange(0, BLOCK_D)
    for start in range(begin + tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        position = start + tl.arange(0, ROWS)
        live = position < end
        row = first_row + tl.load(ids + position, mask=live, other=0)
        mask = live[:, None] & (column < DIM)[None, :]
        found = tl.load(weight + row[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        address = position.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(out + address, found.to(out.dtype.element_ty), mask=mask, eviction_policy=EVICT)


# ---- the order of an update -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["bags_per_feature", "base"])
def number_rows_kernel(
    ids, offsets, first_rows, rows, bags, bags_per_feature, base,
    POOLED: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BAGS bags of a feature a program: rows[p] = base + first_rows[feature] + ids[p], and bags[p] if POOLED."""
    feature = tl.program_id(1).to(tl.int64)
    each = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    bag = feature * bags_per_feature + each
    first_row = tl.load(first_rows + feature) + base
    begin = tl.load(offsets + bag, mask=each < bags_per_feature, other=0)
    end = tl.load(offsets + bag + 1, mask=each < bags_per_feature, other=0)
    for start in range(0, tl.max(end - begin, axis=0), BLOCK):
        position = begin[:, None] + start + tl.arange(0, BLOCK)[None, :]
        live = position < end[:, None]
        row = first_row + tl.load(ids + position, mask=live, other=0)
        tl.store(rows + position, row.to(rows.dtype.element_ty), mask=live)
        if POOLED:
            tl.store(bags + position, (bag[:, None] + tl.zeros_like(position)).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["count", "base", "first"])
def mark_pieces_kernel(
    keys, order, bags, rows, marks, source, count, base, first, CUT: tl.constexpr, POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """marks[p] = 1 where a piece begins; source[p] = row of the gradients that position p of the sorted keys takes.

    rows[p] = keys[p] - base, and `order` counts positions from `first`.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = position < count
    row = tl.load(keys + position, mask=live, other=-1)
    before = tl.load(keys + position - 1, mask=live & (position > 0), other=-1)
    tl.store(rows + position, (row - base).to(rows.dtype.element_ty), mask=live)
    tl.store(marks + position, ((row != before) | (position % CUT == 0)).to(tl.int32), mask=live)
    origin = tl.load(order + position, mask=live, other=first) - first
    if POOLED:
        origin = tl.load(bags + origin, mask=live, other=0).to(tl.int64)
    tl.store(source + position, origin.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["count"])
def list_pieces_kernel(numbers, starts, count, BLOCK: tl.constexpr):
    """numbers: running count of pieces. starts[i] = first position of piece i, and starts[number of pieces] = count."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = position < count
    number = tl.load(numbers + position, mask=live, other=0)
    before = tl.load(numbers + position - 1, mask=live & (position > 0), other=0)
    tl.store(starts + number - 1, position.to(tl.int32), mask=live & (number != before))
    tl.store(starts + number, position.to(tl.int32) + 1, mask=live & (position == count - 1))


# ---- update ---------------------------------------------------------------------------------------------------


@triton.jit
def _apply(
    acc, row, column, apply, old, weight, moment, first_moment, run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Step the rows [S] by summed gradients `acc` [S, D] where `apply` [S]; `old` [S, D] are their present values."""
    mask = apply[:, None] & (column < DIM)[None, :]
    address = row[:, None] * DIM + column[None, :]
    if OPTIMISER == "sgd":
        change = lr * acc
    else:
        square = tl.sum(acc * acc, axis=1) / DIM
        second = tl.load(moment + row, mask=apply, other=0.0)
        if OPTIMISER == "adagrad":
            second += square
            scale = lr / (tl.sqrt(second * moment_scale) + eps)
            change = acc * scale[:, None]
        else:
            second = beta2 * second + (1 - beta2) * square
            mean = tl.load(first_moment + address, mask=mask, other=0.0)
            mean = beta1 * mean + (1 - beta1) * acc
            tl.store(first_moment + address, mean, mask=mask)
            scale = lr / correction1 / (tl.sqrt(second / correction2) + eps)
            change = mean * scale[:, None]
        tl.store(moment + row, second, mask=apply)
    new = old - change
    if ROUND:
        draw = _noise(row, column, run_starts, run_shifts, key, num_runs, SEARCH)
        new = _stochastic_round(new, draw, weight.dtype.element_ty == tl.float16)
    tl.store(weight + address, new.to(weight.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "key", "num_runs"])
def update_short_kernel(
    weight, moment, first_moment, grads, rows, source, coefficients, starts, numbers, partials, count,
    run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr, CUT: tl.constexpr, SHORT: tl.constexpr,
    WEIGHTED: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """PIECES short pieces at a time: sum their gradients; step the row of a whole segment, keep the others' sums."""
    pieces = tl.load(numbers + count - 1).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    live_column = (column < DIM)[None, :]
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(pieces, PIECES), tl.num_programs(0)):
        piece = tile * PIECES + tl.arange(0, PIECES)
        begin = tl.load(starts + piece, mask=piece < pieces, other=0)
        end = tl.load(starts + piece + 1, mask=piece < pieces, other=0)
        length = end - begin
        live = (length > 0) & (length <= SHORT)
        row = tl.load(rows + begin, mask=live, other=0).to(tl.int64)
        before = tl.load(rows + begin - 1, mask=live & (begin > 0), other=-1).to(tl.int64)
        after = tl.load(rows + end, mask=live & (end < count), other=-1).to(tl.int64)
        first = before != row
        whole = live & first & (after != row)
        mask = whole[:, None] & live_column
        old = tl.load(weight + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = tl.zeros([PIECES, BLOCK_D], tl.float32)
        for i in tl.static_range(SHORT):
            more = live & (i < length)
            origin = tl.load(source + begin + i, mask=more, other=0).to(tl.int64)
            address = origin[:, None] * DIM + column[None, :]
            grad = tl.load(grads + address, mask=more[:, None] & live_column, other=0.0).to(tl.float32)
            if WEIGHTED:
                grad *= tl.load(coefficients + begin + i, mask=more, other=0.0)[:, None]
            acc += grad
        slot = (begin // CUT).to(tl.int64) * 2 + first.to(tl.int64)
        rest = (live & (whole == 0))[:, None] & live_column
        tl.store(partials + slot[:, None] * DIM + column[None, :], acc, mask=rest)
        _apply(
            acc, row, column, whole, old, weight, moment, first_moment, run_starts, run_shifts, key,
            num_runs, lr, eps, moment_scale, beta1, beta2, correction1, correction2, DIM, OPTIMISER, ROUND, SEARCH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "key", "num_runs"])
def update_long_kernel(
    weight, moment, first_moment, grads, rows, source, coefficients, starts, numbers, partials, count,
    run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, POSITIONS: tl.constexpr, CUT: tl.constexpr, SHORT: tl.constexpr,
    WEIGHTED: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One block of CUT positions a program: its long pieces one after the other, POSITIONS gradients at a time."""
    block = tl.program_id(0).to(tl.int64)
    block_end = tl.minimum(block * CUT + CUT, count)
    first_piece = tl.load(numbers + block * CUT) - 1
    index = tl.arange(0, CUT)
    live = first_piece + index < tl.load(numbers + block_end - 1)
    begins = tl.load(starts + first_piece + index, mask=live, other=0)
    ends = tl.load(starts + first_piece + index + 1, mask=live, other=0)
    long = ends - begins > SHORT
    column = tl.arange(0, BLOCK_D)
    live_column = (column < DIM)[None, :]
    at = tl.min(tl.where(long, index, CUT), axis=0)
    while at < CUT:
        begin = tl.load(starts + first_piece + at)
        end = tl.load(starts + first_piece + at + 1)
        row = tl.load(rows + begin).to(tl.int64)
        first = (begin == 0) | (tl.load(rows + begin - 1, mask=begin > 0, other=-1) != row)
        last = (end == count) | (tl.load(rows + end, mask=end < count, other=-1) != row)
        row_here = row + tl.zeros([1], tl.int64)
        whole = (first & last) & (row_here >= 0)
        mask = whole[:, None] & live_column
        old = tl.load(weight + row_here[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = tl.zeros([POSITIONS, BLOCK_D], tl.float32)
        position = begin + tl.arange(0, POSITIONS)
        ahead = tl.load(source + position, mask=position < end, other=0)
        for start in range(begin, end, POSITIONS):
            position = start + tl.arange(0, POSITIONS)
            more = position < end
            address = ahead.to(tl.int64)[:, None] * DIM + column[None, :]
            ahead = tl.load(source + position + POSITIONS, mask=position + POSITIONS < end, other=0)
            grad = tl.load(grads + address, mask=more[:, None] & live_column, other=0.0).to(tl.float32)
            if WEIGHTED:
                grad *= tl.load(coefficients + position, mask=more, other=0.0)[:, None]
            acc += grad
        total = tl.sum(acc, axis=0)[None, :]
        slot = block * 2 + first.to(tl.int64)
        tl.store(partials + slot * DIM + column[None, :], total, mask=(whole == 0)[:, None] & live_column)
        _apply(
            total, row_here, column, whole, old, weight, moment, first_moment, run_starts, run_shifts, key,
            num_runs, lr, eps, moment_scale, beta1, beta2, correction1, correction2, DIM, OPTIMISER, ROUND, SEARCH,
        )  # fmt: skip
        at = tl.min(tl.where(long & (index > at), index, CUT), axis=0)


@triton.jit(do_not_specialize=["count", "key", "num_runs"])
def combine_kernel(
    weight, moment, first_moment, rows, partials, count,
    run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr, CUT: tl.constexpr,
    OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One block of CUT positions a program: finish the segment that begins in it and goes on behind it, if any."""
    begin = tl.program_id(0).to(tl.int64) * CUT
    end = begin + CUT
    if end >= count:
        return
    row = tl.load(rows + end - 1)
    if tl.load(rows + end) != row:
        return
    if tl.load(rows + begin - 1, mask=begin > 0, other=-1) == row:  # `and` would load in front of the first row
        return
    column = tl.arange(0, BLOCK_D)
    live_column = column < DIM
    block = tl.program_id(0).to(tl.int64)
    acc = tl.load(partials + (block * 2 + 1) * DIM + column, mask=live_column, other=0.0)
    ahead = tl.arange(0, AHEAD)
    block += 1
    going = tl.full([], 1, tl.int1)
    while going:
        start = (block + ahead) * CUT
        same = (tl.load(rows + start, mask=start < count, other=-1) == row) & (start < count)
        address = (block + ahead)[:, None] * 2 * DIM + column[None, :]
        acc += tl.sum(tl.load(partials + address, mask=same[:, None] & live_column[None, :], other=0.0), axis=0)
        block += AHEAD
        going = tl.min(same.to(tl.int32), axis=0) == 1
    rows_here = row.to(tl.int64) + tl.zeros([1], tl.int64)
    old = tl.load(weight + rows_here[:, None] * DIM + column[None, :], mask=live_column[None, :], other=0.0)
    _apply(
        acc[None, :], rows_here, column, rows_here >= 0, old.to(tl.float32), weight, moment, first_moment,
        run_starts, run_shifts, key, num_runs, lr, eps, moment_scale, beta1, beta2, correction1,
        correction2, DIM, OPTIMISER, ROUND, SEARCH,
    )  # fmt: skip


# ---- launches -------------------------------------------------------------------------------------------------


def _tile(dim: int, elements: int) -> tuple[int, int]:
    """(padded width, rows) of a tile of about `elements` elements."""
    width = triton.next_power_of_2(dim)
    return width, max(elements // width, 1)


def lookup(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, pooling: str, sample_weights: Tensor | None,
    dtype: torch.dtype, *, elements: int = 2048, num_warps: int = 2, tiles: int = 0, evict: str = "",
) -> Tensor:  # fmt: skip
    dim, bags = weight.shape[1], offsets.shape[0] - 1
    width, tile_rows = _tile(dim, elements)
    out = weight.new_empty(bags if pooling != "none" else ids.shape[0], dim, dtype=dtype)
    if bags == 0:
        return out
    options = {"DIM": dim, "BLOCK_D": width, "ROWS": tile_rows, "num_warps": num_warps}
    each = bags // first_rows.shape[0]
    if pooling == "none" and tiles:
        features = first_rows.shape[0]
        grid = (max(triton.cdiv(ids.shape[0], features * tile_rows * tiles), 1), features)
        lookup_positions_kernel[grid](weight, ids, offsets, first_rows, out, each, EVICT=evict, **options)
    elif pooling == "none":
        lookup_rows_kernel[(bags,)](weight, ids, offsets, first_rows, out, each, **options)
    else:
        weighted = sample_weights is not None
        lookup_pooled_kernel[(bags,)](
            weight, ids, offsets, first_rows, sample_weights if weighted else out, out, each,
            MEAN=pooling == "mean", WEIGHTED=weighted, **options,
        )  # fmt: skip
    return out


def number_rows(ids: Tensor, offsets: Tensor, first_rows: Tensor, rows: Tensor, base: int, pooled: bool) -> Tensor:
    """Write base + the row of the matrix of each position into `rows`; the bag of each position, int32 (if pooled)."""
    bags = torch.empty_like(ids, dtype=torch.int32) if pooled else rows
    features, each = first_rows.shape[0], (offsets.shape[0] - 1) // first_rows.shape[0]
    if each:
        grid = (triton.cdiv(each, 16), features)
        number_rows_kernel[grid](
            ids, offsets, first_rows, rows, bags, each, base, POOLED=pooled, BAGS=16, BLOCK=32, num_warps=4
        )
    return bags


def find_pieces(
    keys: Tensor, order: Tensor, bags: Tensor | None, base: int, first: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of N >= 1 sorted keys: (rows = keys - base in `dtype`, source int32 [N], running number of pieces int32 [N],
    piece starts int32 [N + 1])."""
    count = keys.shape[0]
    marks, source = (torch.empty(count, dtype=torch.int32, device=keys.device) for _ in range(2))
    rows = torch.empty(count, dtype=dtype, device=keys.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=keys.device)
    grid, block = (triton.cdiv(count, 1024),), {"BLOCK": 1024, "num_warps": 4}
    pooled = bags is not None
    mark_pieces_kernel[grid](
        keys, order, bags if pooled else order, rows, marks, source, count, base, first, CUT=CUT, POOLED=pooled, **block
    )
    numbers = marks.cumsum(0, dtype=torch.int32)
    list_pieces_kernel[grid](numbers, starts, count, **block)
    return rows, source, numbers, starts


def update(
    weight: Tensor, moment: Tensor | None, first_moment: Tensor | None, grads: Tensor, rows: Tensor, source: Tensor,
    coefficients: Tensor | None, numbers: Tensor, starts: Tensor, noise: tuple[Tensor, Tensor, int], optimiser: str,
    scalars: tuple[float, ...], *, elements: int = 512, num_warps: int = 1, programs_per_sm: int = 256,
    long_elements: int = 512, long_warps: int = 1,
) -> None:  # fmt: skip
    """scalars: lr, eps, moment_scale, beta1, beta2, correction1, correction2. noise: starts, shifts, key."""
    count, dim = rows.shape[0], weight.shape[1]
    width, tile = _tile(dim, elements)
    blocks = triton.cdiv(count, CUT)
    partials = torch.empty(blocks * 2, dim, dtype=torch.float32, device=weight.device)
    state = (weight, moment if moment is not None else partials, first_moment if first_moment is not None else partials)
    weighted = coefficients is not None
    inputs = (grads, rows, source, coefficients if weighted else partials, starts, numbers, partials, count)
    runs = noise[0].shape[0]
    tail = (*noise, runs, *scalars)
    options = {"DIM": dim, "BLOCK_D": width, "CUT": CUT, "OPTIMISER": optimiser, "ROUND": weight.dtype != torch.float32}
    options["SEARCH"] = -(-(runs - 1).bit_length() // 4) * 4  # in steps of 4: fewer compilations
    lengths = {"SHORT": SHORT, "WEIGHTED": weighted}
    grid = (min(triton.cdiv(count, tile), multiprocessors(weight.device) * programs_per_sm),)
    update_short_kernel[grid](*state, *inputs, *tail, PIECES=tile, num_warps=num_warps, **lengths, **options)
    positions = _tile(dim, long_elements)[1]
    update_long_kernel[(blocks,)](
        *state, *inputs, *tail, POSITIONS=positions, num_warps=long_warps, **lengths, **options
    )
    combine_kernel[(blocks,)](*state, rows, partials, count, *tail, AHEAD=16, num_warps=2, **options)
