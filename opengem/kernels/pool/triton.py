"""What stands around the attention of pooling, in one pass each: the norm of modulated seeds, and the joined heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import kind_of, launch
from opengem.kernels.pool.reference import EPS

ROWS = 16  # seeds of a program
BACK_ROWS = 2  # in the backward: its reductions wait for each other, so many small programs hide them
TILE = 4096  # elements of a program that joins or splits heads
PROGRAMS = 2048  # of the backward at least, where there are samples enough: 16 on a multiprocessor


@triton.jit(do_not_specialize=["rows"])
def _join(averages, sums, out, rows, first, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    average = tl.load(averages + row * first + column, mask=mask & (column < first), other=0.0)
    s = tl.load(sums + row * (width - first) + column - first, mask=mask & (column >= first), other=0.0).to(tl.float32)
    size = tl.abs(s)
    short = size * (1 - size * (0.5 - size * 0.33333333))  # of the series, where 1 + size would lose its digits
    log = tl.where(size < 1e-2, short, tl.log(1 + size))
    joined = tl.where(column < first, average.to(tl.float32), tl.where(s < 0, -log, log))
    tl.store(out + row * width + column, joined.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _split(grad, sums, out, rows, first, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width - first)
    own = row * (width - first) + column
    g = tl.load(grad + row * width + first + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sums + own, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + own, (g / (1 + tl.abs(s))).to(out.dtype.element_ty), mask=mask)


def join(averages: Tensor, sums: Tensor) -> Tensor:
    """See `reference.join`."""
    heads = averages.shape[1] + sums.shape[1]
    out = averages.new_empty(averages.shape[0], heads, averages.shape[2])
    rows, width, first = out.shape[0], heads * out.shape[2], averages.shape[1] * out.shape[2]
    block = triton.next_power_of_2(width)
    many = max(1, TILE // block)
    if rows:
        launch(_join, (triton.cdiv(rows, many), 1, 1), kind_of(averages, sums, out, facts=(first, width)),
               (averages, sums, out, rows, first, width), (block, many))
    return out


def split(grad: Tensor, sums: Tensor) -> Tensor:
    """See `reference.split`."""
    grad, out = grad.contiguous(), sums.new_empty(sums.shape)
    rows, width, own = grad.shape[0], grad.shape[1] * grad.shape[2], sums.shape[1] * sums.shape[2]
    block = triton.next_power_of_2(own)
    many = max(1, TILE // block)
    if rows:
        launch(_split, (triton.cdiv(rows, many), 1, 1), kind_of(grad, sums, out, facts=(width - own, width)),
               (grad, sums, out, rows, width - own, width), (block, many))
    return out


@triton.jit
def _normed(seed, scale, shift, columns, width, EPS: tl.constexpr):
    """Seeds `[ROWS, BLOCK]` of one sample, normalised, and their reciprocal standard deviations; zeros beyond width."""
    x = seed * (1 + scale)[None, :] + shift[None, :]
    x = tl.where(columns[None, :] < width, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    factor = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / width + EPS)
    return x * factor[:, None], factor


@triton.jit
def _modulation(pointer, sample, stride, columns, width):
    return tl.load(pointer + sample * stride + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _modulate(seed, scale, shift, out, seeds, width, scale_stride, shift_stride, EPS: tl.constexpr,
              ROWS: tl.constexpr, BLOCK: tl.constexpr):
    sample, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = (row < seeds)[:, None] & (columns < width)[None, :]
    at = row[:, None] * width + columns[None, :]
    own = tl.load(seed + at, mask=mask, other=0.0).to(tl.float32)
    y, _ = _normed(own, _modulation(scale, sample, scale_stride, columns, width),
                   _modulation(shift, sample, shift_stride, columns, width), columns, width, EPS)
    tl.store(out + sample * seeds * width + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["samples"])
def _modulate_backward(grad, seed, scale, shift, dseed, dscale, dshift, samples, seeds, width, scale_stride,
                       shift_stride, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Shares: dseed `[groups, seeds, width]` over the samples of a group, the others `[tiles, samples, width]`."""
    group, tile, columns = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = (row < seeds)[:, None] & (columns < width)[None, :]
    at = row[:, None] * width + columns[None, :]
    own = tl.load(seed + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for number in range(group, samples, tl.num_programs(0)):
        sample = tl.zeros([], tl.int64) + number
        factors = _modulation(scale, sample, scale_stride, columns, width)
        y, factor = _normed(own, factors, _modulation(shift, sample, shift_stride, columns, width), columns, width, EPS)
        g = tl.load(grad + sample * seeds * width + at, mask=mask, other=0.0).to(tl.float32)
        inner = g - (tl.sum(g, 1) / width)[:, None] - y * (tl.sum(g * y, 1) / width)[:, None]
        inner = tl.where(mask, inner * factor[:, None], 0.0)
        total += inner * (1 + factors)[None, :]
        share = (tile * samples + sample) * width + columns
        tl.store(dscale + share, tl.sum(inner * own, 0), mask=columns < width)
        tl.store(dshift + share, tl.sum(inner, 0), mask=columns < width)
    tl.store(dseed + group.to(tl.int64) * seeds * width + at, total, mask=mask)


def modulate(seed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """See `reference.modulate`."""
    (seeds, width), samples = seed.shape, scale.shape[0]
    out = seed.new_empty(samples, seeds, width)
    if out.numel():
        strides = width, scale.stride(0), shift.stride(0)
        launch(_modulate, (samples, triton.cdiv(seeds, ROWS), 1), kind_of(seed, scale, shift, facts=(seeds, *strides)),
               (seed, scale, shift, out, seeds, *strides), (EPS, ROWS, triton.next_power_of_2(width)), 8)
    return out


def modulate_backward(grad: Tensor, seed: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.modulate_backward`."""
    (seeds, width), samples = seed.shape, scale.shape[0]
    tiles = triton.cdiv(seeds, BACK_ROWS)
    groups = min(triton.cdiv(PROGRAMS, tiles), samples)  # that share the samples
    grad = grad.contiguous()
    dseed = torch.empty(groups, seeds, width, dtype=torch.float32, device=seed.device)
    dscale, dshift = torch.empty(2, tiles, samples, width, dtype=torch.float32, device=seed.device)
    if grad.numel():
        strides = width, scale.stride(0), shift.stride(0)
        launch(_modulate_backward, (groups, tiles, 1), kind_of(grad, seed, scale, shift, facts=(seeds, *strides)),
               (grad, seed, scale, shift, dseed, dscale, dshift, samples, seeds, *strides),
               (EPS, BACK_ROWS, triton.next_power_of_2(width)), 2)
    return dseed.sum(0).to(seed.dtype), dscale.sum(0).to(seed.dtype), dshift.sum(0).to(seed.dtype)
