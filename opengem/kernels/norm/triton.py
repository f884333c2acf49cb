"""Norms on a GPU: a program holds whole rows, so x is read once and y (or its 8-bit blocks) written once.

The backward runs a fixed number of programs that walk the rows; each keeps its share of the weight and bias gradients
in registers and stores it once, and a second small sum over the shares finishes them: no atomics, the same bits every
run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import kind_of, launch, multiprocessors
from opengem.kernels.mx.triton import quantize_tile

WIDE = 1024  # above it the forward has eight warps, not four
TILE = 2048  # elements of a tile of the forward; half as many warps where the mean is taken as well
WIDE_TILE = 8192
BACKWARD_TILE = 2048  # the same for the backward, which holds more of them
BACKWARD_PROGRAMS = 2  # of eight warps an SM
BACKWARD_STAGES = 4  # tiles under way: the sums over a row would otherwise leave the memory idle
CENTERED_BACKWARD = {1024: (4096, 2, 3), 4096: (2048, 4, 4)}  # by width: tile, programs, stages that were faster
QUANTIZED_WIDTH = 1024  # up to it the fused quantisation keeps 32 whole rows in registers
QUANTIZED_COLUMNS = 64  # of the 32 rows a warp takes, with two registers a thread for each
QUANTIZED_STAGES = 3  # tiles under way; two where a residual doubles them
QUANTIZED_CHUNK = 512  # columns at a time of wider rows


@triton.jit
def _normalised(values, columns, width, eps, CENTERED: tl.constexpr, WHOLE: tl.constexpr):
    """(unit-variance rows, mean or 0, reciprocal deviation) of an fp32 tile whose cells past `width` are 0.

    WHOLE: there are none.
    """
    mean = tl.zeros([values.shape[0]], tl.float32)
    if CENTERED:
        mean = tl.sum(values, 1) / width
        values = values - mean[:, None]
        if not WHOLE:
            values = tl.where((columns < width)[None, :], values, 0.0)
    rstd = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    return values * rstd[:, None], mean, rstd


@triton.jit
def _affine(y, weight, bias, columns, width, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    inside = columns < width
    if WEIGHT:
        y = y * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y = y + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _load_sum(x, residual, total, pointer, mask, RESIDUAL: tl.constexpr):
    """x, or `x + residual` rounded to the dtype of x and stored to `total`; as fp32."""
    values = tl.load(x + pointer, mask=mask, other=0.0)
    if RESIDUAL:
        added = values.to(tl.float32) + tl.load(residual + pointer, mask=mask, other=0.0).to(tl.float32)
        values = added.to(x.dtype.element_ty)
        tl.store(total + pointer, values, mask=mask)
    return values.to(tl.float32)


@triton.jit
def _store_statistics(mean_out, rstd_out, row, rows, mean, rstd, CENTERED: tl.constexpr):
    if CENTERED:
        tl.store(mean_out + row, mean, mask=row < rows)
    tl.store(rstd_out + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _forward(x, residual, weight, bias, y, total, mean_out, rstd_out, rows, width, eps, CENTERED: tl.constexpr,
             RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
             WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None]
    if not WHOLE:
        mask &= (columns < width)[None, :]
    pointer = row[:, None] * width + columns[None, :]
    values = _load_sum(x, residual, total, pointer, mask, RESIDUAL)
    unit, mean, rstd = _normalised(values, columns, width, eps, CENTERED, WHOLE)
    unit = _affine(unit, weight, bias, columns, width, WEIGHT, BIAS)
    tl.store(y + pointer, unit.to(y.dtype.element_ty), mask=mask)
    _store_statistics(mean_out, rstd_out, row, rows, mean, rstd, CENTERED)


@triton.jit
def _load_chunk(x, residual, total, row, rows, start, width, RESIDUAL: tl.constexpr, CHUNK: tl.constexpr,
                WHOLE: tl.constexpr):
    columns = start + tl.arange(0, CHUNK)
    mask = (row < rows)[:, None]
    if not WHOLE:
        mask &= (columns < width)[None, :]
    pointer = row[:, None] * width + columns[None, :]
    values = tl.load(x + pointer, mask=mask, other=0.0)
    if RESIDUAL:
        added = values.to(tl.float32) + tl.load(residual + pointer, mask=mask, other=0.0).to(tl.float32)
        values = added.to(x.dtype.element_ty)
        tl.store(total + pointer, values, mask=mask)
    return values


@triton.jit
def _join(mean, squares, values, start, width, CENTERED: tl.constexpr, CHUNK: tl.constexpr):
    """Statistics of the columns before `start` joined with those of a chunk (Chan, Golub and LeVeque)."""
    values = values.to(tl.float32)
    if CENTERED:
        count = tl.minimum(width - start, CHUNK).to(tl.float32)
        middle = tl.sum(values, 1) / count
        inside = (start + tl.arange(0, CHUNK) < width)[None, :]
        values = tl.where(inside, values - middle[:, None], 0.0)
        share = count / (start + count)
        squares += (middle - mean) * (middle - mean) * start * share
        mean += (middle - mean) * share
    return mean, squares + tl.sum(values * values, 1)


@triton.jit
def _quantize_chunk(values, mean, rstd, weight, bias, data, scale, row, rows, start, width, block_row,
                    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr, CHUNK: tl.constexpr,
                    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr):
    columns = start + tl.arange(0, CHUNK)
    kind: tl.constexpr = values.dtype
    values = values.to(tl.float32)
    if CENTERED:
        values = values - mean[:, None]
    values = _affine(values * rstd[:, None], weight, bias, columns, width, WEIGHT, BIAS)
    mask = (row < rows)[:, None]
    if not WHOLE:
        mask &= (columns < width)[None, :]
    if CENTERED or BIAS:
        values = tl.where(mask, values, 0.0)
    scaled, exponent = quantize_tile(values, kind, CHUNK, ASSEMBLY)
    tl.store(data + row[:, None] * width + columns[None, :], scaled.to(data.dtype.element_ty), mask=mask)
    used = tl.cdiv(width, 32)
    block = start // 32 + tl.arange(0, CHUNK // 32)
    tl.store(scale + block_row * used + block, exponent.to(tl.uint8), mask=block < used)


@triton.jit(do_not_specialize=["rows"])
def _forward_mx(x, residual, weight, bias, data, scale, total, mean_out, rstd_out, rows, width, eps,
                CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                CHUNK: tl.constexpr, WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, STAGES: tl.constexpr):
    """A program walks over tiles of 32 whole rows, the next ones under way: takes their statistics, then scales blocks
    of 32 columns as `mx.reference` does."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, 32), tl.num_programs(0), num_stages=STAGES):
        block_row = tl.cast(tile, tl.int64)
        row = block_row * 32 + tl.arange(0, 32)
        values = _load_chunk(x, residual, total, row, rows, 0, width, RESIDUAL, CHUNK, WHOLE)
        _, mean, rstd = _normalised(values.to(tl.float32), tl.arange(0, CHUNK), width, eps, CENTERED, WHOLE)
        _store_statistics(mean_out, rstd_out, row, rows, mean, rstd, CENTERED)
        _quantize_chunk(values, mean, rstd, weight, bias, data, scale, row, rows, 0, width, block_row, WEIGHT, BIAS,
                        CENTERED, CHUNK, WHOLE, ASSEMBLY)


@triton.jit(do_not_specialize=["rows"])
def _forward_mx_wide(x, residual, weight, bias, data, scale, total, mean_out, rstd_out, rows, width, eps,
                     CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                     CHUNK: tl.constexpr, WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A program takes 32 rows: their statistics, then blocks of 32 columns scaled as `mx.reference` does.

    The last chunk of columns stays in registers; those before it are read a second time, the latest first.
    """
    block_row = tl.program_id(0).to(tl.int64)
    row = block_row * 32 + tl.arange(0, 32)
    mean = tl.zeros([32], tl.float32)
    squares = tl.zeros([32], tl.float32)
    last = (width - 1) // CHUNK * CHUNK
    for start in range(0, last, CHUNK):
        values = _load_chunk(x, residual, total, row, rows, start, width, RESIDUAL, CHUNK, WHOLE)
        mean, squares = _join(mean, squares, values, start, width, CENTERED, CHUNK)
    values = _load_chunk(x, residual, total, row, rows, last, width, RESIDUAL, CHUNK, WHOLE)
    mean, squares = _join(mean, squares, values, last, width, CENTERED, CHUNK)
    rstd = tl.rsqrt(squares / width + eps)
    _store_statistics(mean_out, rstd_out, row, rows, mean, rstd, CENTERED)
    _quantize_chunk(values, mean, rstd, weight, bias, data, scale, row, rows, last, width, block_row, WEIGHT, BIAS,
                    CENTERED, CHUNK, WHOLE, ASSEMBLY)
    if last > 0:
        tl.debug_barrier()  # other threads read what this one wrote
    for back in range(0, last // CHUNK):
        start = (last // CHUNK - 1 - back) * CHUNK
        columns = start + tl.arange(0, CHUNK)
        values = tl.load((total if RESIDUAL else x) + row[:, None] * width + columns[None, :],
                         mask=(row < rows)[:, None], other=0.0)
        _quantize_chunk(values, mean, rstd, weight, bias, data, scale, row, rows, start, width, block_row, WEIGHT,
                        BIAS, CENTERED, CHUNK, WHOLE, ASSEMBLY)


@triton.jit(do_not_specialize=["rows"])
def _backward(grad, grad_total, total, weight, mean_in, rstd_in, grad_x, grad_weight, grad_bias, rows, width,
              CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
              ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    scale = tl.zeros([WIDTH], tl.float32) + 1.0
    if WEIGHT:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_share = tl.zeros([ROWS, WIDTH], tl.float32)
    bias_share = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        pointer = row[:, None] * width + columns[None, :]
        g = tl.load(grad + pointer, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(total + pointer, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_in + row, mask=row < rows, other=0.0)
        if CENTERED:
            values = tl.where(mask, values - tl.load(mean_in + row, mask=row < rows, other=0.0)[:, None], 0.0)
        unit = values * rstd[:, None]
        if WEIGHT:
            weight_share += g * unit
        if BIAS:
            bias_share += g
        g = g * scale[None, :]
        out = g - unit * (tl.sum(g * unit, 1) / width)[:, None]
        if CENTERED:
            out -= (tl.sum(g, 1) / width)[:, None]
        out = out * rstd[:, None]
        if RESIDUAL:
            out += tl.load(grad_total + pointer, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + pointer, out.to(grad_x.dtype.element_ty), mask=mask)
    share = tl.program_id(0) * width + columns
    if WEIGHT:
        tl.store(grad_weight + share, tl.sum(weight_share, 0), mask=inside)
    if BIAS:
        tl.store(grad_bias + share, tl.sum(bias_share, 0), mask=inside)


def _inputs(x: Tensor, *optional: Tensor | None) -> tuple[list[Tensor], tuple | None, tuple[bool, ...]]:
    """x and the optional inputs for a kernel, x in place of those left out; the key of its launch; which are there."""
    tensors = [x if y is None else y.contiguous() for y in optional]
    return [x, *tensors], kind_of(x, *tensors, facts=(x.shape[1],)), tuple(y is not None for y in optional)


def row_outputs(x: Tensor, residual: Tensor | None, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the sum `[M, N]` and the mean and reciprocal deviation `[M]`; the first two empty where not wanted."""
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    mean = x.new_empty(x.shape[0] if centered else 0, dtype=torch.float32)
    return total, mean, x.new_empty(x.shape[0], dtype=torch.float32)


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                 centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_forward`."""
    x = x.contiguous()
    rows, width = x.shape
    y, (total, mean, rstd) = x.new_empty(x.shape), row_outputs(x, residual, centered)
    tensors, key, present = _inputs(x, residual, weight, bias)
    padded = triton.next_power_of_2(width)
    tile, warps = (WIDE_TILE, 8) if padded > WIDE else (TILE, 2 if centered else 4)
    tile_rows = max(1, tile // padded)
    if rows:
        launch(_forward, (triton.cdiv(rows, tile_rows), 1, 1), key, (*tensors, y, total, mean, rstd, rows, width, eps),
               (centered, *present, tile_rows, padded, width == padded), warps=warps)
    return y, total, mean, rstd


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_quantize_forward`."""
    x = x.contiguous()
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = row_outputs(x, residual, centered)
    tensors, key, present = _inputs(x, residual, weight, bias)
    arguments = (*tensors, data, scale, total, mean, rstd, rows, width, eps)
    padded, blocks = max(triton.next_power_of_2(width), 32), scale.shape[0]
    chunk = min(padded, QUANTIZED_WIDTH if padded <= QUANTIZED_WIDTH else QUANTIZED_CHUNK)
    constants = (centered, *present, chunk, width % chunk == 0, x.is_cuda)
    options = {"warps": max(1, chunk // QUANTIZED_COLUMNS), "registers": 2 * QUANTIZED_COLUMNS}
    if rows and padded <= QUANTIZED_WIDTH:
        stages = QUANTIZED_STAGES if residual is None else 2
        programs = max(1, QUANTIZED_WIDTH // padded) * multiprocessors(x.device)
        launch(_forward_mx, (min(blocks, programs), 1, 1), key, arguments, (*constants, stages), **options)
    elif rows:
        launch(_forward_mx_wide, (blocks, 1, 1), key, arguments, constants, **options)
    return data, scale, total, mean, rstd


def norm_backward(grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, mean: Tensor,
                  rstd: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.norm_backward`."""
    total = total.contiguous()
    rows, width = total.shape
    grad_x = total.new_empty(total.shape)
    padded = triton.next_power_of_2(width)
    usual = BACKWARD_TILE, BACKWARD_PROGRAMS, BACKWARD_STAGES
    tile, programs, stages = CENTERED_BACKWARD.get(padded, usual) if mean.numel() else usual
    tile_rows = max(1, tile // padded)
    warps = min(max(8, padded // 256), 16)
    programs = min(triton.cdiv(rows, tile_rows), programs * 8 // warps * multiprocessors(total.device))
    shares = [rstd.new_empty(programs if used else 0, width) for used in (weight is not None, has_bias)]
    (total, grad, grad_total, scale), key, present = _inputs(total, grad, grad_total, weight)
    if rows:
        launch(_backward, (programs, 1, 1), key,
               (grad, grad_total, total, scale, mean, rstd, grad_x, *shares, rows, width),
               (mean.numel() > 0, *present[1:], has_bias, tile_rows, padded, stages), warps=warps)
    vectors = [share.sum(0) if used else rstd.new_empty(0)
               for share, used in zip(shares, (weight is not None, has_bias), strict=True)]
    return grad_x, vectors[0], vectors[1]
