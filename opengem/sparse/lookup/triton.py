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
SHORT = 2  # longest piece that is reduced together with others


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
    """ROWS positions of one feature at a time, whatever their bags: out[p] = weight[first_rows[feature] + ids[p]]."""
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
        tl.store(out + address, found.to(out.dtype.element_ty), mask=mask)


# ---- the order of an update -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["bags_per_feature", "base"])
def number_rows_kernel(
    ids, offsets, first_rows, keys, origins, bags_per_feature, base,
    POOLED: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BAGS bags of a feature a program: keys[p] = base + first_rows[feature] + ids[p]; origins[p] = the row of the
    gradients that position p takes, which is its bag if POOLED."""
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
        tl.store(keys + position, row.to(keys.dtype.element_ty), mask=live)
        origin = bag[:, None] + tl.zeros_like(position) if POOLED else position
        tl.store(origins + position, origin.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["count"])
def mark_pieces_kernel(keys, order, origins, marks, source, count, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """marks[p] = 1 where a piece of the sorted keys begins; source[p] = origins[order[p]]."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = position < count
    key = tl.load(keys + position, mask=live, other=-1)
    before = tl.load(keys + position - 1, mask=live & (position > 0), other=-1)
    tl.store(marks + position, ((key != before) | (position % CUT == 0)).to(tl.int32), mask=live)
    origin = tl.load(origins + tl.load(order + position, mask=live, other=0), mask=live, other=0)
    tl.store(source + position, origin, mask=live)


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
    acc, row, column, apply, old, second, weight, moment, first_moment, run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Step the rows [S] by summed gradients `acc` [S, D] where `apply` [S]; `old` and `second` are what they hold."""
    mask = apply[:, None] & (column < DIM)[None, :]
    address = row[:, None] * DIM + column[None, :]
    if OPTIMISER == "sgd":
        change = lr * acc
    else:
        square = tl.sum(acc * acc, axis=1) / DIM
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


@triton.jit
def _gradients(grads, origin, column, live, DIM: tl.constexpr):
    """float32 [S, D]: the gradients of rows `origin` [S], 0 where not `live`."""
    address = origin.to(tl.int64)[:, None] * DIM + column[None, :]
    return tl.load(grads + address, mask=live[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _update_short(
    program, programs, weight, moment, first_moment, grads, keys, source, coefficients, starts, numbers, partials,
    first, last, base, run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr, VISIT: tl.constexpr, CUT: tl.constexpr,
    SHORT: tl.constexpr, WEIGHTED: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """PIECES short pieces at a time: sum their gradients; step the row of a whole segment, keep the others' sums.
    VISIT neighbours one after the other, so that what a tile loads of the lists is in the L1 for the next."""
    low = tl.load(numbers + first) - 1
    pieces = tl.load(numbers + last - 1)
    column = tl.arange(0, BLOCK_D)
    live_column = (column < DIM)[None, :]
    for index in range(low // VISIT + program, tl.cdiv(pieces, VISIT), programs):
        for part in range(0, VISIT, PIECES):
            piece = index * VISIT + part + tl.arange(0, PIECES)
            inside = (piece >= low) & (piece < pieces)
            begin = tl.load(starts + piece, mask=inside, other=0)
            length = tl.load(starts + piece + 1, mask=inside, other=0) - begin
            live = (length > 0) & (length <= SHORT)
            row_key = tl.load(keys + begin, mask=live, other=0)
            is_first = tl.load(keys + begin - 1, mask=live & (begin > first), other=-1) != row_key
            is_last = tl.load(keys + begin + length, mask=live & (begin + length < last), other=-1) != row_key
            whole = live & is_first & is_last
            row = row_key.to(tl.int64) - base
            mask = whole[:, None] & live_column
            old = tl.load(weight + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
            second = tl.load(moment + row, mask=whole, other=0.0) if OPTIMISER != "sgd" else 0.0
            acc = tl.zeros([PIECES, BLOCK_D], tl.float32)
            for i in tl.static_range(SHORT):
                more = live & (i < length)
                grad = _gradients(grads, tl.load(source + begin + i, mask=more, other=0), column, more, DIM)
                if WEIGHTED:
                    grad *= tl.load(coefficients + begin + i - first, mask=more, other=0.0)[:, None]
                acc += grad
            slot = (begin // CUT - first // CUT).to(tl.int64) * 2 + is_first.to(tl.int64)
            rest = (live & (whole == 0))[:, None] & live_column
            tl.store(partials + slot[:, None] * DIM + column[None, :], acc, mask=rest)
            _apply(
                acc, row, column, whole, old, second, weight, moment, first_moment, run_starts, run_shifts, key,
                num_runs, lr, eps, moment_scale, beta1, beta2, correction1, correction2, DIM, OPTIMISER, ROUND, SEARCH,
            )  # fmt: skip


@triton.jit
def _update_long(
    program, weight, moment, first_moment, grads, keys, source, coefficients, starts, numbers, partials,
    first, last, base, run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, POSITIONS: tl.constexpr, CUT: tl.constexpr, SHORT: tl.constexpr,
    WEIGHTED: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One block of CUT positions a program: its long pieces one after the other, POSITIONS gradients at a time."""
    block = first // CUT + program
    block_begin = tl.maximum(block * CUT, first)
    block_end = tl.minimum(block * CUT + CUT, last)
    first_piece = tl.load(numbers + block_begin) - 1
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
        row_key = tl.load(keys + begin)
        before = tl.load(keys + begin - 1, mask=begin > first, other=-1)
        after = tl.load(keys + end, mask=end < last, other=-1)
        position = begin + tl.arange(0, POSITIONS)
        ahead = tl.load(source + position, mask=position < end, other=0)
        is_first = before != row_key
        row = row_key.to(tl.int64) - base + tl.zeros([1], tl.int64)
        whole = (is_first & (after != row_key)) & (row >= 0)
        mask = whole[:, None] & live_column
        old = tl.load(weight + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(moment + row, mask=whole, other=0.0) if OPTIMISER != "sgd" else 0.0
        acc = tl.zeros([POSITIONS, BLOCK_D], tl.float32)
        for start in range(begin, end, POSITIONS):
            position = start + tl.arange(0, POSITIONS)
            grad = _gradients(grads, ahead, column, position < end, DIM)
            ahead = tl.load(source + position + POSITIONS, mask=position + POSITIONS < end, other=0)
            if WEIGHTED:
                grad *= tl.load(coefficients + position - first, mask=position < end, other=0.0)[:, None]
            acc += grad
        total = tl.sum(acc, axis=0)[None, :]
        slot = program.to(tl.int64) * 2 + is_first.to(tl.int64)
        tl.store(partials + slot * DIM + column[None, :], total, mask=(whole == 0)[:, None] & live_column)
        _apply(
            total, row, column, whole, old, second, weight, moment, first_moment, run_starts, run_shifts, key, num_runs,
            lr, eps, moment_scale, beta1, beta2, correction1, correction2, DIM, OPTIMISER, ROUND, SEARCH,
        )  # fmt: skip
        at = tl.min(tl.where(long & (index > at), index, CUT), axis=0)


@triton.jit(do_not_specialize=["first", "last", "base", "key", "num_runs", "blocks", "every"])
def update_kernel(
    weight, moment, first_moment, grads, keys, source, coefficients, starts, numbers, partials, first, last, base,
    run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2, blocks, every,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr, VISIT: tl.constexpr, POSITIONS: tl.constexpr,
    CUT: tl.constexpr, SHORT: tl.constexpr, WEIGHTED: tl.constexpr, OPTIMISER: tl.constexpr, ROUND: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """Long and short pieces side by side, of each `every` programs the first takes a block's long ones: while these
    wait for one load after the other, short ones keep the memory busy."""
    program = tl.program_id(0)
    block = program // every
    if (block < blocks) & (program % every == 0):
        _update_long(
            block, weight, moment, first_moment, grads, keys, source, coefficients, starts, numbers, partials, first,
            last, base, run_starts, run_shifts, key, num_runs, lr, eps, moment_scale, beta1, beta2, correction1,
            correction2, DIM, BLOCK_D, POSITIONS, CUT, SHORT, WEIGHTED, OPTIMISER, ROUND, SEARCH,
        )  # fmt: skip
    else:
        _update_short(
            program - tl.minimum(block + 1, blocks), tl.num_programs(0) - blocks, weight, moment, first_moment, grads,
            keys, source, coefficients, starts, numbers, partials, first, last, base, run_starts, run_shifts, key,
            num_runs, lr, eps, moment_scale, beta1, beta2, correction1, correction2, DIM, BLOCK_D, PIECES, VISIT, CUT,
            SHORT, WEIGHTED, OPTIMISER, ROUND, SEARCH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "last", "base", "key", "num_runs"])
def combine_kernel(
    weight, moment, first_moment, keys, partials, first, last, base,
    run_starts, run_shifts, key, num_runs,
    lr, eps, moment_scale, beta1, beta2, correction1, correction2,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr, CUT: tl.constexpr,
    OPTIMISER: tl.constexpr, ROUND: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One block of CUT positions a program: finish the segment that begins in it and goes on behind it, if any."""
    block = tl.program_id(0)
    begin = tl.maximum((first // CUT + block) * CUT, first)
    end = (first // CUT + block + 1) * CUT
    if end >= last:
        return
    row_key = tl.load(keys + end - 1)
    if tl.load(keys + end) != row_key:
        return
    if tl.load(keys + begin - 1, mask=begin > first, other=-1) == row_key:  # `and` would load in front of the first key
        return
    column = tl.arange(0, BLOCK_D)
    live_column = column < DIM
    acc = tl.load(partials + (block.to(tl.int64) * 2 + 1) * DIM + column, mask=live_column, other=0.0)
    ahead = tl.arange(0, AHEAD)
    block += 1
    going = tl.full([], 1, tl.int1)
    while going:
        start = (first // CUT + block + ahead) * CUT
        same = (tl.load(keys + start, mask=start < last, other=-1) == row_key) & (start < last)
        address = (block + ahead).to(tl.int64)[:, None] * 2 * DIM + column[None, :]
        acc += tl.sum(tl.load(partials + address, mask=same[:, None] & live_column[None, :], other=0.0), axis=0)
        block += AHEAD
        going = tl.min(same.to(tl.int32), axis=0) == 1
    row = row_key.to(tl.int64) - base + tl.zeros([1], tl.int64)
    old = tl.load(weight + row[:, None] * DIM + column[None, :], mask=live_column[None, :], other=0.0)
    second = tl.load(moment + row) if OPTIMISER != "sgd" else 0.0
    _apply(
        acc[None, :], row, column, row >= 0, old.to(tl.float32), second, weight, moment, first_moment, run_starts,
        run_shifts, key, num_runs, lr, eps, moment_scale, beta1, beta2, correction1, correction2,
        DIM, OPTIMISER, ROUND, SEARCH,
    )  # fmt: skip


# ---- launches -------------------------------------------------------------------------------------------------


def _tile(dim: int, elements: int) -> tuple[int, int]:
    """(padded width, rows) of a tile of about `elements` elements."""
    width = triton.next_power_of_2(dim)
    return width, max(elements // width, 1)


def lookup(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, pooling: str, sample_weights: Tensor | None,
    dtype: torch.dtype, *, tile: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """tile: (elements, warps)."""
    dim, bags, features = weight.shape[1], offsets.shape[0] - 1, first_rows.shape[0]
    elements, num_warps = tile or ((2048, 2) if pooling == "none" else (256, 1))
    width, tile_rows = _tile(dim, elements)
    out = weight.new_empty(bags if pooling != "none" else ids.shape[0], dim, dtype=dtype)
    if out.shape[0] == 0:
        return out
    options = {"DIM": dim, "BLOCK_D": width, "ROWS": tile_rows, "num_warps": num_warps}
    if pooling == "none":
        grid = (triton.cdiv(ids.shape[0], features * tile_rows), features)
        lookup_rows_kernel[grid](weight, ids, offsets, first_rows, out, bags // features, **options)
    else:
        weighted = sample_weights is not None
        lookup_pooled_kernel[(bags,)](
            weight, ids, offsets, first_rows, sample_weights if weighted else out, out, bags // features,
            MEAN=pooling == "mean", WEIGHTED=weighted, **options,
        )  # fmt: skip
    return out


def number_rows(
    ids: Tensor, offsets: Tensor, first_rows: Tensor, keys: Tensor, origins: Tensor, base: int, pooled: bool
) -> None:
    """Write base + the row of the matrix of each position into `keys`, and what gradients it takes into `origins`."""
    features, each = first_rows.shape[0], (offsets.shape[0] - 1) // first_rows.shape[0]
    if each:
        grid = (triton.cdiv(each, 16), features)
        number_rows_kernel[grid](
            ids, offsets, first_rows, keys, origins, each, base, POOLED=pooled, BAGS=16, BLOCK=32, num_warps=4
        )


def find_pieces(keys: Tensor, order: Tensor, origins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(source int32 [N], running number of pieces int32 [N], piece starts int32 [N + 1]) of N >= 1 sorted keys."""
    count = keys.shape[0]
    marks, source = (torch.empty(count, dtype=torch.int32, device=keys.device) for _ in range(2))
    starts = torch.empty(count + 1, dtype=torch.int32, device=keys.device)
    grid, block = (triton.cdiv(count, 1024),), {"BLOCK": 1024, "num_warps": 4}
    mark_pieces_kernel[grid](keys, order, origins, marks, source, count, CUT=CUT, **block)
    numbers = marks.cumsum(0, dtype=torch.int32)
    list_pieces_kernel[grid](numbers, starts, count, **block)
    return source, numbers, starts


def update(
    weight: Tensor, moment: Tensor | None, first_moment: Tensor | None, grads: Tensor, keys: Tensor, source: Tensor,
    coefficients: Tensor | None, numbers: Tensor, starts: Tensor, span: tuple[int, int, int],
    noise: tuple[Tensor, Tensor, int], optimiser: str, scalars: tuple[float, ...], *,
    short: int = 256, long: int = 512, visit: int = 16, programs_per_sm: int = 256,
) -> None:  # fmt: skip
    """span: the positions [first, last) of the sorted keys that are this matrix's, and the key of its row 0.

    noise: starts, shifts, key. scalars: lr, eps, moment_scale, beta1, beta2, correction1, correction2. short, long:
    elements of a tile of short pieces, and of a long one. visit: neighbouring short pieces that one program takes.
    """
    (first, last, _), dim = span, weight.shape[1]
    width, tile = _tile(dim, short)
    visit = max(visit, tile)
    blocks = triton.cdiv(last, CUT) - first // CUT
    partials = torch.empty(blocks * 2, dim, dtype=torch.float32, device=weight.device)
    state = (weight, moment if moment is not None else partials, first_moment if first_moment is not None else partials)
    weighted, runs = coefficients is not None, noise[0].shape[0]
    inputs = (grads, keys, source, coefficients if weighted else partials, starts, numbers, partials, *span)
    tail = (*noise, runs, *scalars)
    options = {"DIM": dim, "BLOCK_D": width, "CUT": CUT, "OPTIMISER": optimiser, "ROUND": weight.dtype != torch.float32}
    options["SEARCH"] = -(-(runs - 1).bit_length() // 4) * 4  # in steps of 4: fewer compilations
    lengths = {"SHORT": SHORT, "WEIGHTED": weighted, "PIECES": tile, "VISIT": visit, "POSITIONS": _tile(dim, long)[1]}
    programs = blocks + min(triton.cdiv(last - first, visit), multiprocessors(weight.device) * programs_per_sm)
    update_kernel[(programs,)](
        *state, *inputs, *tail, blocks, programs // blocks, num_warps=1, **lengths, **options
    )
    combine_kernel[(blocks,)](*state, keys, partials, *span, *tail, AHEAD=16, num_warps=2, **options)
