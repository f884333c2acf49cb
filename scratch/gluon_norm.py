"""Norm and MX quantisation in one pass on Hopper, in Gluon: rows wait in shared memory while their statistics are taken.

A block's scale needs the norm of its 32 rows, and so all their columns: with the rows in registers (`triton.py`) one CTA
fills a multiprocessor and its loads, sums and stores take turns. Here a CTA holds 64 KB of rows in shared memory and
passes over them, so three share a multiprocessor. A warp owns subtiles of 32 rows and 64 columns, two blocks each:
only the sums over whole rows cross warps.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.launch import aligned, kind_of, launch

WIDTHS = (128, 256, 512, 1024)
SUBTILES = 16  # of 32 rows and 64 columns in 64 KB; eight warps take eight at a time
REGISTERS = 80  # a thread: three CTAs of 256 threads an SM


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _load(stack, FLAT: gl.constexpr, DEEP: gl.constexpr):
    """Eight subtiles in fp32, `[8, 32, 64]`."""
    return gl.convert_layout(gl.reshape(stack.load(FLAT), [8, 32, 64]), DEEP).to(gl.float32)


@gluon.jit
def _row_sums(values, GROUPS: gl.constexpr, ROWS: gl.constexpr):
    """Sums over the columns that eight subtiles hold of each of `32 * GROUPS` rows."""
    sums = gl.reshape(gl.sum(values, 2), [8 // GROUPS, 32 * GROUPS])
    return gl.sum(gl.convert_layout(sums, ROWS), 0)


@gluon.jit
def _spread(rows, GROUPS: gl.constexpr, ROWS: gl.constexpr, DEEP: gl.constexpr):
    """A number of each row where its elements are, `[8, 32, 1]`."""
    whole = gl.zeros([8 // GROUPS, 32 * GROUPS], gl.float32, ROWS) + rows[None, :]
    return gl.convert_layout(gl.reshape(whole, [8, 32]), gl.SliceLayout(2, DEEP))[:, :, None]


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, weight, bias, data, scale, mean_out, rstd_out, rows, eps, CENTERED: gl.constexpr,
                WEIGHT: gl.constexpr, BIAS: gl.constexpr, WIDTH: gl.constexpr):
    GROUPS: gl.constexpr = 1024 // WIDTH
    flat: gl.constexpr = gl.BlockedLayout([8, 8], [4, 8], [8, 1], [1, 0])
    deep: gl.constexpr = gl.BlockedLayout([1, 8, 8], [1, 4, 8], [8, 1, 1], [2, 1, 0])
    sums: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 8], [1, 0])
    small: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 8], [1, 0])
    kind: gl.constexpr = x_desc.dtype
    first = gl.program_id(0) * (32 * GROUPS)
    tile = gl.allocate_shared_memory(kind, [16, 32, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 16 * x_desc.block_type.nbytes)
    for subtile in gl.static_range(16):
        row = first + 32 * (subtile % GROUPS)
        tma.async_copy_global_to_shared(x_desc, [row, 64 * (subtile // GROUPS)], ready, tile.index(subtile))
    mbarrier.wait(ready, 0)
    stacks = tile._reinterpret(kind, [2, 256, 64], x_desc.layout)
    mean = gl.zeros([32 * GROUPS], gl.float32, gl.SliceLayout(0, sums))
    if CENTERED:
        for half in gl.static_range(2):
            mean += _row_sums(_load(stacks.index(half), flat, deep), GROUPS, sums)
        mean = mean / WIDTH
    squares = gl.zeros([32 * GROUPS], gl.float32, gl.SliceLayout(0, sums))
    for half in gl.static_range(2):
        values = _load(stacks.index(half), flat, deep)
        if CENTERED:
            values = values - _spread(mean, GROUPS, sums, deep)
        squares += _row_sums(values * values, GROUPS, sums)
    rstd = gl.rsqrt(squares / WIDTH + eps)
    line = first + gl.arange(0, 32 * GROUPS, gl.SliceLayout(0, sums))
    gl.store(rstd_out + line, rstd, mask=line < rows)
    if CENTERED:
        gl.store(mean_out + line, mean, mask=line < rows)
    for half in gl.static_range(2):
        subtile = 8 * half + gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, deep)))
        inner = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, deep)))
        column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, deep)))
        column = gl.convert_layout(64 * (subtile // GROUPS), gl.SliceLayout(1, gl.SliceLayout(1, deep)))[:, None] \
            + column[None, :]
        values = _load(stacks.index(half), flat, deep)
        if CENTERED:
            values = values - _spread(mean, GROUPS, sums, deep)
        values = values * _spread(rstd, GROUPS, sums, deep)
        if WEIGHT:
            values = values * gl.load(weight + column).to(gl.float32)[:, None, :]
        if BIAS:
            values = values + gl.load(bias + column).to(gl.float32)[:, None, :]
        row = first + 32 * (subtile % GROUPS)[:, None] + inner[None, :]
        blocks = gl.reshape(values, [8, 32, 2, 32])
        largest = gl.reduce(gl.reduce(gl.abs(blocks), 3, _larger), 1, _larger).to(kind).to(gl.float32)
        bits = largest.to(gl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
        exponent = gl.where(bits >= 0x7F800000, 255, gl.maximum(exponent, 0))
        inverse = (gl.where(exponent == 255, 127, 254 - exponent) << 23).to(gl.float32, bitcast=True)
        if kind == gl.bfloat16:
            blocks = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [blocks], dtype=gl.bfloat16, is_pure=True, pack=2)
        blocks = blocks.to(kind).to(gl.float32) * inverse[:, None, :, None]
        bytes = gl.convert_layout(gl.reshape(blocks, [8, 32, 64]), deep).to(data.dtype.element_ty)
        target = data + (row.to(gl.int64) * WIDTH)[:, :, None] + column[:, None, :]
        gl.store(target, bytes, mask=(row < rows)[:, :, None])
        exponent = gl.convert_layout(exponent, small)
        subtile = 8 * half + gl.arange(0, 8, gl.SliceLayout(1, small))
        block_row = gl.program_id(0).to(gl.int64) * GROUPS + subtile % GROUPS
        block = 2 * (subtile // GROUPS)[:, None] + gl.arange(0, 2, gl.SliceLayout(0, small))[None, :]
        gl.store(scale + block_row[:, None] * (WIDTH // 32) + block, exponent.to(gl.uint8),
                 mask=(block_row * 32 < rows)[:, None])


@functools.cache
def _layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([32, 64], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def takes(x: Tensor, residual: Tensor | None) -> bool:
    """Whether this kernel serves these inputs."""
    return residual is None and x.shape[1] in WIDTHS and aligned(x)


def norm_quantize_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
                          outputs: tuple[Tensor, ...]) -> None:
    """`reference.norm_quantize_forward` without a residual, for what `takes` says; fills (data, scale, mean, rstd)."""
    rows, width = x.shape
    vectors = [x if y is None else y.contiguous() for y in (weight, bias)]
    data, scale, mean, rstd = outputs
    desc = TensorDescriptor(x, [rows, width], [width, 1], [32, 64], _layout(x.dtype))
    launch(_forward_mx, (-(-rows * width // 32768), 1, 1), kind_of(x, *vectors),
           (desc, *vectors, data, scale, mean, rstd, rows, eps),
           (centered, weight is not None, bias is not None, width), warps=8, registers=REGISTERS)
