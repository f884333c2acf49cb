"""Jagged flash attention in Triton, forward and backward, without float atomics and without a host sync.

One program owns one tile of rows of one sample and head. Sample b's tiles start at slot `offsets[b] // BLOCK + b`; at
most `T // BLOCK + B` slots before the end hold every tile, so the grid needs no lengths on the host and launches no
tile per `max_q`. A program finds its sample by binary search in the offsets. Slot B stands for the rows behind
`offsets[-1]`: a sample without partners, which writes zeros.

Only tiles on the edge of the mask (the end of the keys, the window) evaluate it; the loops over full tiles do not.
The backward runs a query-stationary kernel (dq, delta, pair-bias gradient), then a key-stationary one (dk, dv); seven
matrix products instead of five, but each result is summed by one program in one order. A relative bias gets its
gradient from a third kernel that owns diagonals. Head dimensions that are no power of two (96) run in the next larger
tile with masked columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.jfa.reference import Options
from opengem.kernels.launch import aligned, launch

LOG2E = tl.constexpr(1.4426950408889634)
PAIR = tl.constexpr(1)
RELATIVE = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Rows of the stationary tile, rows of the streamed tile, warps, pipeline stages."""

    own: int
    stream: int
    warps: int
    stages: int


# One configuration for each kernel and padded head dimension; all are tested. Never chosen by data.
CONFIGS = {
    "forward": {
        32: Config(128, 64, 4, 3), 64: Config(128, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(128, 64, 8, 2),
    },
    "dq": {
        32: Config(128, 64, 4, 3), 64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 2),
    },
    "dkdv": {
        32: Config(128, 64, 4, 3), 64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2),
    },
    "diagonals": {
        32: Config(64, 64, 4, 1), 64: Config(64, 64, 4, 1), 128: Config(64, 64, 8, 1), 256: Config(64, 64, 8, 1),
    },
}


def config(kernel: str, head_dim: int, biased: bool) -> Config:
    """The configuration of a kernel; tiles of a bias need registers and pipeline space, so the others get smaller."""
    padded = max(32, triton.next_power_of_2(head_dim))
    tile = CONFIGS[kernel][padded]
    if not biased:
        return tile
    return Config(tile.own, min(tile.stream, 64 if padded < 128 else 32), 8, min(tile.stages, 2))


@functools.cache
def _plan(kernel: str, dim: int, group: int, has_left: bool, has_right: bool, bias: int) -> tuple[Config, tuple]:
    """(configuration, constants as the kernel takes them)."""
    tile = config(kernel, dim, bias != 0)
    sizes = {"dkdv": (tile.stream, tile.own), "diagonals": (tile.own,)}.get(kernel, (tile.own, tile.stream))
    kind = () if kernel == "diagonals" else (bias,)
    return tile, (group, has_left, has_right, *kind, dim, max(16, triton.next_power_of_2(dim)), *sizes)


# ---- where a program works -------------------------------------------------------------------------------------


@triton.jit
def _locate(offsets_ptr, slot, total, batch, steps, BLOCK: tl.constexpr):
    """(sample, its first row, its length, first row of this tile within it); sample == batch means the unused rows."""
    low = 0
    high = batch
    for _ in range(steps):
        middle = (low + high + 1) // 2
        start = tl.load(offsets_ptr + middle).to(tl.int64) // BLOCK + middle
        low = tl.where(start <= slot, middle, low)
        high = tl.where(start <= slot, high, middle - 1)
    begin = tl.load(offsets_ptr + low).to(tl.int64)
    end = tl.load(offsets_ptr + low + 1, mask=low < batch, other=0).to(tl.int64)
    end = tl.where(low < batch, end, total)
    first = (slot - (begin // BLOCK + low)) * BLOCK
    return low, begin, (end - begin).to(tl.int32), first.to(tl.int32)


@triton.jit
def _partner(offsets_ptr, sample, batch):
    """(first row, length) of a sample on the other side; length 0 for the unused rows."""
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    end = tl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int64)
    return begin, tl.where(sample < batch, end - begin, 0).to(tl.int32)


@triton.jit
def _span(first, end, length, before, after, BLOCK: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """(low, full_low, full_high, high) of the partner rows of own positions [first, end), in steps of BLOCK.

    Own position x sees partners x - before ... x + after. Tiles of [full_low, full_high) are visible to all of them.
    """
    low = 0
    high = length
    full_low = 0
    full_high = length // BLOCK * BLOCK
    if HAS_BEFORE:
        low = tl.maximum(first - before, 0) // BLOCK * BLOCK
        full_low = (tl.maximum(end - 1 - before, 0) + BLOCK - 1) // BLOCK * BLOCK
    if HAS_AFTER:
        high = tl.minimum(length, tl.maximum(end + after, 0))
        full_high = tl.minimum(full_high, tl.maximum(first + after + 1, 0) // BLOCK * BLOCK)
    full_low = tl.minimum(full_low, (high + BLOCK - 1) // BLOCK * BLOCK)
    return low, full_low, tl.maximum(full_high, full_low), high


@triton.jit
def _rows(base, index, length, stride, MASK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of rows `index` of `base`; rows from `length` on read 0 where MASK, as do padded columns."""
    column = tl.arange(0, BLOCK_D)[None, :]
    address = base + index.to(tl.int64)[:, None] * stride + column
    if MASK:
        if HEAD_DIM == BLOCK_D:
            return tl.load(address, mask=(index < length)[:, None], other=0.0)
        return tl.load(address, mask=(index < length)[:, None] & (column < HEAD_DIM), other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(address)
    return tl.load(address, mask=column < HEAD_DIM, other=0.0)


@triton.jit
def _store_rows(base, index, length, stride, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = (index < length)[:, None] & (column < HEAD_DIM)
    tl.store(base + index.to(tl.int64)[:, None] * stride + column, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _bias_base(bias_ptr, pair_offsets_ptr, sample, head, columns, batch, BIAS: tl.constexpr):
    base = bias_ptr
    if BIAS != 0:
        base += head.to(tl.int64) * columns
    if BIAS == PAIR:
        base += tl.load(pair_offsets_ptr + tl.minimum(sample, batch - 1), mask=sample < batch, other=0)
    return base


@triton.jit
def _bias_tile(base, i, j, m, n, radius, BIAS: tl.constexpr):
    """Bias of queries `i` and keys `j` (broadcast against each other), in units of log2."""
    if BIAS == PAIR:
        tile = tl.load(base + i.to(tl.int64) * n + j, mask=(i < m) & (j < n), other=0.0)
    else:
        tile = tl.load(base + tl.minimum(tl.maximum(j - i - (n - m), -radius), radius) + radius)
    return tile.to(tl.float32) * LOG2E


@triton.jit
def _visible(i, j, m, n, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    visible = (i < m) & (j < n)
    if HAS_LEFT:
        visible = visible & (j - i - (n - m) >= -left)
    if HAS_RIGHT:
        visible = visible & (j - i - (n - m) <= right)
    return visible


@triton.jit
def _log2_sum(lse_ptr, index, length):
    """The log-sum-exp in units of log2; +inf where there is no row or it sees no key, so that 2^(score - it) is 0."""
    lse = tl.load(lse_ptr + index, mask=index < length, other=float("inf")) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


# ---- forward ---------------------------------------------------------------------------------------------------


@triton.jit
def _forward_tiles(
    acc, row_max, row_sum, q, i, k_base, v_base, bias_base, k_stride, v_stride, start, end, m, n, scale2, left, right,
    radius, MASK: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
):
    for j0 in tl.range(start, end, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        k = _rows(k_base, j, n, k_stride, MASK, HEAD_DIM, BLOCK_D)
        v = _rows(v_base, j, n, v_stride, MASK, HEAD_DIM, BLOCK_D)
        score = tl.dot(q, k.T)
        factor = scale2
        if BIAS != 0:
            score = score * scale2 + _bias_tile(bias_base, i[:, None], j[None, :], m, n, radius, BIAS)
            factor = 1.0
        if MASK:
            visible = _visible(i[:, None], j[None, :], m, n, left, right, HAS_LEFT, HAS_RIGHT)
            score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * factor)
        shift = new_max
        if MASK or BIAS != 0:  # a row may have seen nothing yet
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(score * factor - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["total_q", "batch", "steps", "left", "right", "radius", "bias_columns"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_offsets_ptr, kv_offsets_ptr, bias_ptr, pair_offsets_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, bias_columns, total_q, batch, steps,
    scale2, left, right, radius,
    GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1)
    sample, q_begin, m, first = _locate(q_offsets_ptr, tl.program_id(0), total_q, batch, steps, BLOCK_M)
    if first >= m:
        return
    k_begin, n = _partner(kv_offsets_ptr, sample, batch)
    q_base = q_ptr + q_begin * q_stride + head.to(tl.int64) * q_head
    k_base = k_ptr + k_begin * k_stride + (head // GROUP).to(tl.int64) * k_head
    v_base = v_ptr + k_begin * v_stride + (head // GROUP).to(tl.int64) * v_head
    bias_base = _bias_base(bias_ptr, pair_offsets_ptr, sample, head, bias_columns, batch, BIAS)
    i = first + tl.arange(0, BLOCK_M)
    q = _rows(q_base, i, m, q_stride, True, HEAD_DIM, BLOCK_D)
    position = first + n - m
    low, full_low, full_high, high = _span(
        position, tl.minimum(first + BLOCK_M, m) + n - m, n, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_LEFT:
        acc, row_max, row_sum = _forward_tiles(
            acc, row_max, row_sum, q, i, k_base, v_base, bias_base, k_stride, v_stride, low, full_low, m, n, scale2,
            left, right, radius, True, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    acc, row_max, row_sum = _forward_tiles(
        acc, row_max, row_sum, q, i, k_base, v_base, bias_base, k_stride, v_stride, full_low, full_high, m, n, scale2,
        left, right, radius, False, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    acc, row_max, row_sum = _forward_tiles(
        acc, row_max, row_sum, q, i, k_base, v_base, bias_base, k_stride, v_stride, full_high, high, m, n, scale2,
        left, right, radius, True, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    lse = (row_max + tl.log2(row_sum)) / LOG2E
    out_base = out_ptr + q_begin * out_stride + head.to(tl.int64) * HEAD_DIM
    _store_rows(out_base, i, m, out_stride, out, HEAD_DIM, BLOCK_D)
    lse = tl.where(row_sum == 0.0, float("-inf"), lse)
    tl.store(lse_ptr + head.to(tl.int64) * total_q + q_begin + i, lse, mask=i < m)


# ---- backward --------------------------------------------------------------------------------------------------


@triton.jit
def _dq_tiles(
    dq, q, dout, lse2, delta, i, k_base, v_base, bias_base, dbias_base, k_stride, v_stride, start, end, m, n, scale2,
    left, right, radius, MASK: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
):
    for j0 in tl.range(start, end, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        k = _rows(k_base, j, n, k_stride, MASK, HEAD_DIM, BLOCK_D)
        v = _rows(v_base, j, n, v_stride, MASK, HEAD_DIM, BLOCK_D)
        score = tl.dot(q, k.T) * scale2
        if BIAS != 0:
            score += _bias_tile(bias_base, i[:, None], j[None, :], m, n, radius, BIAS)
        p = tl.exp2(score - lse2[:, None])
        if MASK:
            p = tl.where(_visible(i[:, None], j[None, :], m, n, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        ds = p * (tl.dot(dout, v.T) - delta[:, None])
        if BIAS == PAIR:
            cell = dbias_base + i.to(tl.int64)[:, None] * n + j[None, :]
            tl.store(cell, ds.to(dbias_base.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["total_q", "batch", "steps", "left", "right", "radius", "bias_columns"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, dq_ptr, delta_ptr, q_offsets_ptr, kv_offsets_ptr,
    bias_ptr, dbias_ptr, pair_offsets_ptr, q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    out_stride, bias_columns, total_q, batch, steps, scale, left, right, radius, HAS_DLSE: tl.constexpr,
    GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1)
    sample, q_begin, m, first = _locate(q_offsets_ptr, tl.program_id(0), total_q, batch, steps, BLOCK_M)
    if first >= m:
        return
    k_begin, n = _partner(kv_offsets_ptr, sample, batch)
    wide_head = head.to(tl.int64)
    k_base = k_ptr + k_begin * k_stride + (head // GROUP).to(tl.int64) * k_head
    v_base = v_ptr + k_begin * v_stride + (head // GROUP).to(tl.int64) * v_head
    bias_base = _bias_base(bias_ptr, pair_offsets_ptr, sample, head, bias_columns, batch, BIAS)
    dbias_base = bias_base
    if BIAS == PAIR:
        dbias_base = _bias_base(dbias_ptr, pair_offsets_ptr, sample, head, bias_columns, batch, BIAS)
    i = first + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + q_begin * q_stride + wide_head * q_head, i, m, q_stride, True, HEAD_DIM, BLOCK_D)
    dout_base = dout_ptr + q_begin * dout_stride + wide_head * dout_head
    dout = _rows(dout_base, i, m, dout_stride, True, HEAD_DIM, BLOCK_D)
    own = q_begin * out_stride + wide_head * HEAD_DIM  # out and dq are dense
    out = _rows(out_ptr + own, i, m, out_stride, True, HEAD_DIM, BLOCK_D)
    row = wide_head * total_q + q_begin
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row + i, mask=i < m, other=0.0)
    tl.store(delta_ptr + row + i, delta, mask=i < m)
    lse2 = _log2_sum(lse_ptr + row, i, m)
    scale2 = scale * LOG2E
    low, full_low, full_high, high = _span(
        first + n - m, tl.minimum(first + BLOCK_M, m) + n - m, n, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_LEFT:
        dq = _dq_tiles(
            dq, q, dout, lse2, delta, i, k_base, v_base, bias_base, dbias_base, k_stride, v_stride, low, full_low, m, n,
            scale2, left, right, radius, True, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    dq = _dq_tiles(
        dq, q, dout, lse2, delta, i, k_base, v_base, bias_base, dbias_base, k_stride, v_stride, full_low, full_high, m,
        n, scale2, left, right, radius, False, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    dq = _dq_tiles(
        dq, q, dout, lse2, delta, i, k_base, v_base, bias_base, dbias_base, k_stride, v_stride, full_high, high, m, n,
        scale2, left, right, radius, True, BLOCK_N, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    _store_rows(dq_ptr + own, i, m, out_stride, dq * scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, j, q_base, dout_base, lse_base, delta_base, bias_base, q_stride, dout_stride, start, end, m, n,
    scale2, left, right, radius, MASK: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
):
    # Scores are formed transposed, keys down: no register tile is ever transposed on its way into a product.
    for i0 in tl.range(start, end, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        q = _rows(q_base, i, m, q_stride, MASK, HEAD_DIM, BLOCK_D)
        dout = _rows(dout_base, i, m, dout_stride, MASK, HEAD_DIM, BLOCK_D)
        if MASK:
            lse2 = _log2_sum(lse_base, i, m)
            delta = tl.load(delta_base + i, mask=i < m, other=0.0)
        else:
            lse2 = tl.load(lse_base + i) * LOG2E
            delta = tl.load(delta_base + i)
            if BIAS != 0:
                lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
        score = tl.dot(k, q.T) * scale2
        if BIAS != 0:
            score += _bias_tile(bias_base, i[None, :], j[:, None], m, n, radius, BIAS)
        p = tl.exp2(score - lse2[None, :])
        if MASK:
            p = tl.where(_visible(i[None, :], j[:, None], m, n, left, right, HAS_LEFT, HAS_RIGHT), p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, dout.T) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["total_q", "total_kv", "batch", "steps", "left", "right", "radius", "bias_columns"])
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_offsets_ptr, kv_offsets_ptr,
    bias_ptr, pair_offsets_ptr, q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    dk_stride, bias_columns, total_q, total_kv, batch, steps, scale, left, right, radius,
    GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    sample, k_begin, n, first = _locate(kv_offsets_ptr, tl.program_id(0), total_kv, batch, steps, BLOCK_N)
    if first >= n:
        return
    q_begin, m = _partner(q_offsets_ptr, sample, batch)
    j = first + tl.arange(0, BLOCK_N)
    k = _rows(k_ptr + k_begin * k_stride + kv_head * k_head, j, n, k_stride, True, HEAD_DIM, BLOCK_D)
    v = _rows(v_ptr + k_begin * v_stride + kv_head * v_head, j, n, v_stride, True, HEAD_DIM, BLOCK_D)
    scale2 = scale * LOG2E
    # Seen from a key the window is turned round: queries `right` before to `left` after it.
    low, full_low, full_high, high = _span(
        first + m - n, tl.minimum(first + BLOCK_N, n) + m - n, m, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        q_base = q_ptr + q_begin * q_stride + head * q_head
        dout_base = dout_ptr + q_begin * dout_stride + head * dout_head
        lse_base = lse_ptr + head * total_q + q_begin
        delta_base = delta_ptr + head * total_q + q_begin
        bias_base = _bias_base(bias_ptr, pair_offsets_ptr, sample, head, bias_columns, batch, BIAS)
        if HAS_RIGHT:
            dk, dv = _dkdv_tiles(
                dk, dv, k, v, j, q_base, dout_base, lse_base, delta_base, bias_base, q_stride, dout_stride, low,
                full_low, m, n, scale2, left, right, radius, True, BLOCK_M, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT,
                BIAS)
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, j, q_base, dout_base, lse_base, delta_base, bias_base, q_stride, dout_stride, full_low,
            full_high, m, n, scale2, left, right, radius, False, BLOCK_M, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, j, q_base, dout_base, lse_base, delta_base, bias_base, q_stride, dout_stride, full_high,
            high, m, n, scale2, left, right, radius, True, BLOCK_M, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT, BIAS)
    own = k_begin * dk_stride + kv_head * HEAD_DIM
    _store_rows(dk_ptr + own, j, n, dk_stride, dk * scale, HEAD_DIM, BLOCK_D)
    _store_rows(dv_ptr + own, j, n, dk_stride, dv, HEAD_DIM, BLOCK_D)


@triton.jit
def _score_gradient(
    q, dout, lse2, delta, i, j, k_base, v_base, bias_base, k_stride, v_stride, m, n, scale2, left, right, radius,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):
    """Gradient of the scores of queries `i` and keys `j`, which may start before 0; 0 where not visible."""
    inside = (j >= 0) & (j < n)
    j_read = tl.where(inside, j, n)
    k = _rows(k_base, j_read, n, k_stride, True, HEAD_DIM, BLOCK_D)
    v = _rows(v_base, j_read, n, v_stride, True, HEAD_DIM, BLOCK_D)
    score = tl.dot(q, k.T) * scale2 + _bias_tile(bias_base, i[:, None], j[None, :], m, n, radius, RELATIVE)
    seen = _visible(i[:, None], j[None, :], m, n, left, right, HAS_LEFT, HAS_RIGHT) & inside[None, :]
    p = tl.where(seen, tl.exp2(score - lse2[:, None]), 0.0)
    return p * (tl.dot(dout, v.T) - delta[:, None])


@triton.jit(do_not_specialize=["total_q", "batch", "left", "right", "radius", "bias_columns", "distances", "lowest"])
def _diagonals_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, sums_ptr, q_offsets_ptr, kv_offsets_ptr, bias_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head, bias_columns, total_q, batch,
    distances, lowest, scale, left, right, radius,
    GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sums of score gradients over equal distance: BLOCK distances of one head over every num_programs(2)-th sample."""
    first = lowest + tl.program_id(0) * BLOCK
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    bias_base = bias_ptr + head * bias_columns
    scale2 = scale * LOG2E
    step = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for sample in range(part, batch, tl.num_programs(2)):
        q_begin, m = _partner(q_offsets_ptr, sample, batch)
        k_begin, n = _partner(kv_offsets_ptr, sample, batch)
        k_base = k_ptr + k_begin * k_stride + head // GROUP * k_head
        v_base = v_ptr + k_begin * v_stride + head // GROUP * v_head
        # Query i meets these distances at keys i + n - m + first and on; outside [0, n) there are none.
        low = tl.maximum(m - n - first - BLOCK + 1, 0) // BLOCK * BLOCK
        for i0 in range(low, tl.minimum(m, m - first), BLOCK):
            i = i0 + step
            q = _rows(q_ptr + q_begin * q_stride + head * q_head, i, m, q_stride, True, HEAD_DIM, BLOCK_D)
            dout_base = dout_ptr + q_begin * dout_stride + head * dout_head
            dout = _rows(dout_base, i, m, dout_stride, True, HEAD_DIM, BLOCK_D)
            lse2 = _log2_sum(lse_ptr + head * total_q + q_begin, i, m)
            delta = tl.load(delta_ptr + head * total_q + q_begin + i, mask=i < m, other=0.0)
            j = i0 + n - m + first + step
            near = _score_gradient(
                q, dout, lse2, delta, i, j, k_base, v_base, bias_base, k_stride, v_stride, m, n, scale2, left, right,
                radius, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT)
            far = _score_gradient(
                q, dout, lse2, delta, i, j + BLOCK, k_base, v_base, bias_base, k_stride, v_stride, m, n, scale2, left,
                right, radius, HEAD_DIM, BLOCK_D, HAS_LEFT, HAS_RIGHT)
            both = tl.where(step[None, :] >= step[:, None], near, far)
            sums += tl.sum(tl.gather(both, (step[None, :] + step[:, None]) % BLOCK, 1), 0)
    column = tl.program_id(0) * BLOCK + step
    base = sums_ptr + (part * tl.num_programs(1) + head) * distances
    tl.store(base + column, sums, mask=column < distances)


# ---- launch ----------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`."""
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    total, heads, dim = q.shape
    batch = q_offsets.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
    key = _key(bias, strides, q, k, v, q_offsets, kv_offsets)
    facts = _facts(q, k, options)
    bias, pairs, columns, radius = _bias_arguments(bias, q_offsets, kv_offsets, options)
    tile, constants = _plan("forward", *facts)
    launch(
        _forward_kernel, (total // tile.own + batch + 1, heads, 1), key,
        (q, k, v, out, lse, q_offsets, kv_offsets, bias, pairs, *strides, heads * dim, columns, total, batch,
         batch.bit_length(), options.scale * LOG2E.value, options.left, options.right, radius),
        constants, tile.warps, tile.stages)
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.backward`."""
    q, k, v, dout = _dense_rows(q), _dense_rows(k), _dense_rows(v), _dense_rows(dout)
    total, heads, dim = q.shape
    batch, kv_heads = q_offsets.shape[0] - 1, k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k, k))
    delta = torch.empty_like(lse)
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2]
    dlse = None if dlse is None else dlse.contiguous()
    key = _key(bias, strides, q, k, v, q_offsets, kv_offsets, dout, out, lse, *(() if dlse is None else (dlse,)))
    facts = _facts(q, k, options)
    bias, pairs, columns, radius = _bias_arguments(bias, q_offsets, kv_offsets, options)
    dbias = torch.zeros_like(bias) if options.pair else None
    mask = options.scale, options.left, options.right, radius
    tile, constants = _plan("dq", *facts)
    launch(
        _dq_kernel, (total // tile.own + batch + 1, heads, 1), key,
        (q, k, v, out, dout, lse, dlse, dq, delta, q_offsets, kv_offsets, bias, dbias, pairs, *strides, heads * dim,
         columns, total, batch, batch.bit_length(), *mask), (dlse is not None, *constants), tile.warps,
        tile.stages)
    tile, constants = _plan("dkdv", *facts)
    launch(
        _dkdv_kernel, (k.shape[0] // tile.own + batch + 1, kv_heads, 1), key,
        (q, k, v, dout, lse, delta, dk, dv, q_offsets, kv_offsets, bias, pairs, *strides, kv_heads * dim, columns,
         total, k.shape[0], batch, batch.bit_length(), *mask), constants, tile.warps, tile.stages)
    if options.relative:
        dbias = _relative_gradient(
            q, k, v, dout, lse, delta, q_offsets, kv_offsets, bias, strides, facts, mask, max_q, max_kv)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias


def _relative_gradient(
    q, k, v, dout, lse, delta, q_offsets, kv_offsets, table, strides, facts, mask, max_q, max_kv
) -> Tensor:
    """Two stages, each in a fixed order: sums per distance in up to 64 parts of the batch, then per table entry."""
    heads, batch = q.shape[1], q_offsets.shape[0] - 1
    distances, lowest, radius = max_q + max_kv - 1, 1 - max_kv, table.shape[1] // 2
    if min(max_q, max_kv, batch) == 0:
        return torch.zeros_like(table)
    tile, constants = _plan("diagonals", *facts)
    blocks = triton.cdiv(distances, tile.own)
    parts = max(1, min(64, batch, 2048 // (blocks * heads)))
    sums = torch.empty((parts, heads, distances), dtype=torch.float32, device=q.device)
    launch(
        _diagonals_kernel, (blocks, heads, parts), None,
        (q, k, v, dout, lse, delta, sums, q_offsets, kv_offsets, table, *strides, table.shape[1], q.shape[0], batch,
         distances, lowest, *mask), constants, tile.warps, tile.stages)
    sums = sums.sum(0)
    gradient = torch.zeros(table.shape, dtype=torch.float32, device=q.device)
    first, last = max(1 - radius, lowest), min(radius - 1, max_q - 1)
    if first <= last:
        gradient[:, first + radius : last + radius + 1] = sums[:, first - lowest : last - lowest + 1]
    gradient[:, 0] += sums[:, : max(0, 1 - radius - lowest)].sum(1)
    gradient[:, -1] += sums[:, max(radius, 1) - lowest :].sum(1)
    return gradient.to(table.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _key(bias: Tensor | None, strides: tuple, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
         *more: Tensor) -> tuple | None:
    """For `launch`; a bias has a column count that may or may not fit 32 bits, so its kernels are bound each time."""
    if bias is not None or not aligned(q, k, v, q_offsets, kv_offsets, *more):
        return None
    return q.device, q.dtype, q_offsets.dtype, kv_offsets.dtype, q.shape[1], strides


def _facts(q: Tensor, k: Tensor, options: Options) -> tuple[int, int, bool, bool, int]:
    """What `_plan` wants to know of a call."""
    bias = PAIR.value if options.pair else RELATIVE.value if options.relative else 0
    return q.shape[2], q.shape[1] // k.shape[1], options.left >= 0, options.right >= 0, bias


def _bias_arguments(bias: Tensor | None, q_offsets: Tensor, kv_offsets: Tensor, options: Options):
    """(bias, first cell of each sample, columns, radius) as the kernels take them."""
    if bias is None:
        return None, None, 0, 0
    if options.relative:
        return bias.contiguous(), None, bias.shape[1], bias.shape[1] // 2
    cells = q_offsets.diff().long() * kv_offsets.diff().long()
    return bias.contiguous(), cells.cumsum(0) - cells, bias.shape[1], 0
