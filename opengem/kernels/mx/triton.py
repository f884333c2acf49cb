"""Block quantisation on a GPU: 32x32 blocks of E4M3 with E8M0 scales, bit for bit as in `reference.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import kind_of, launch

COLUMNS = 512  # most of a program's tile of 32 rows


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(values, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp32 values rounded to `kind`. Two at a time where assembly can say so: one at a time is an eighth as fast."""
    if kind == tl.bfloat16 and ASSEMBLY:
        values = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2)
    return values.to(kind).to(tl.float32)


@triton.jit
def quantize_tile(values, kind: tl.constexpr, WIDTH: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(scaled fp32 `[32, WIDTH]`, E8M0 exponents int32 `[WIDTH / 32]`) of an fp32 tile, rounded to `kind` first.

    Nothing scaled exceeds 448. The largest magnitude is taken before rounding, which keeps the order; NaN lies above
    everything: a NaN or inf makes its block's scale NaN.
    """
    BLOCKS: tl.constexpr = WIDTH // 32
    blocks = tl.reshape(values, [32, BLOCKS, 32])
    largest = tl.reduce(tl.reduce(tl.abs(blocks), 2, _larger), 0, _larger).to(kind).to(tl.float32)
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits >= 0x7F800000, 255, tl.maximum(exponent, 0))
    inverse = (tl.where(exponent == 255, 127, 254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = _rounded(blocks, kind, ASSEMBLY) * inverse[None, :, None]
    return tl.reshape(scaled, [32, WIDTH]), exponent


@triton.jit(do_not_specialize=["rows"])
def _quantize(x, data, scale, rows, width, WIDTH: tl.constexpr):
    tiles = tl.cdiv(width, WIDTH)
    block_row = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * WIDTH
    row = block_row * 32 + tl.arange(0, 32)
    columns = first + tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (columns < width)[None, :]
    pointer = row[:, None] * width + columns[None, :]
    values = tl.load(x + pointer, mask=mask, other=0.0).to(tl.float32)
    scaled, exponent = quantize_tile(values, tl.float32, WIDTH, False)
    tl.store(data + pointer, scaled.to(data.dtype.element_ty), mask=mask)
    used = tl.cdiv(width, 32)
    block = first // 32 + tl.arange(0, WIDTH // 32)
    tl.store(scale + block_row * used + block, exponent.to(tl.uint8), mask=block < used)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantize`, for blocks of 32x32 and E4M3."""
    x = x.contiguous()
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((triton.cdiv(rows, 32), triton.cdiv(width, 32)), dtype=torch.uint8)
    if x.numel():
        columns = min(max(32, triton.next_power_of_2(width)), COLUMNS)
        launch(_quantize, (scale.shape[0] * triton.cdiv(width, columns), 1, 1), kind_of(x, facts=(width,)),
               (x, data, scale, rows, width), (columns,), warps=8 if columns == COLUMNS else 4)
    return data, scale
