"""Norms fused with quantisation on Hopper in Gluon: 32 rows of x come by TMA and stay in shared memory for two passes.

A block of the quantised result spans 32 rows and its scale needs their statistics first, so every element is looked at
twice. Held in registers that is too few bytes under way; here a program keeps 32 or 64 KB in shared memory, several
programs share a multiprocessor, and while one computes the others load. Rows of more than 1,024 elements (512 with a
residual, which takes half of the room) are split between programs that hand each other their share of the statistics
through memory. They wait only for programs of the same rows, which start together, and add the shares in order: the
same bits every run.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.launch import aligned, kind_of, launch
from opengem.kernels.norm import triton as portable

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
SLICE = gl.constexpr(256)  # columns a program works on at a time: a block of 32 for each of eight warps
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 8], [1, 0]))


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=KEEP_NAN)


@gluon.jit
def _wide(x):
    """x in fp32, an instruction each."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
                                         dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def _scaled(y, inverse, KIND: gl.constexpr):
    """E4M3 of fp32 `y` rounded to `KIND`, times `inverse`; two or four numbers an instruction where there is one."""
    if gl.bfloat16 == KIND:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 p, q, a, b, c, d; .reg .b16 e, f;
            cvt.rn.bf16x2.f32 p, $2, $1; cvt.rn.bf16x2.f32 q, $4, $3; mul.bf16x2 p, p, $5; mul.bf16x2 q, q, $6;
            shl.b32 a, p, 16; and.b32 b, p, 0xffff0000; shl.b32 c, q, 16; and.b32 d, q, 0xffff0000;
            cvt.rn.satfinite.e4m3x2.f32 e, b, a; cvt.rn.satfinite.e4m3x2.f32 f, d, c; mov.b32 $0, {e, f}; }""",
            "=r,r,r,r,r,r,r", [y, inverse.to(KIND)], dtype=gl.float8e4nv, is_pure=True, pack=4)
    else:
        return (y.to(KIND).to(gl.float32) * inverse).to(gl.float8e4nv)


@gluon.jit
def _quantized(y, KIND: gl.constexpr):
    """(E4M3 `[32, SLICE]`, E8M0 exponents int32 `[SLICE / 32]`), as `mx.triton.quantize_tile`."""
    BLOCKS: gl.constexpr = SLICE // 32
    y = gl.reshape(gl.permute(gl.reshape(y, [32, BLOCKS, 32]), (1, 0, 2)), [BLOCKS, 1024])
    largest = gl.reduce(gl.abs(y), 1, _larger).to(KIND).to(gl.float32)
    bits = largest.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.where(bits >= 0x7F800000, 255, gl.maximum(exponent, 0))
    inverse = (gl.where(exponent == 255, 127, 254 - exponent) << 23).to(gl.float32, bitcast=True)
    y, inverse = gl.broadcast(y, inverse[:, None])
    scaled = gl.permute(gl.reshape(_scaled(y, inverse, KIND), [BLOCKS, 32, 32]), (1, 0, 2))
    return gl.convert_layout(gl.reshape(scaled, [32, SLICE]), LAYOUT), exponent


@gluon.jit
def _statistics(x, r, total, top, rows, first, width, CENTERED: gl.constexpr, RESIDUAL: gl.constexpr,
                PARTS: gl.constexpr, WHOLE: gl.constexpr, BASE: gl.constexpr):
    """(mean or 0, sum of squares about it) of the columns from `first` on of 32 rows in the slices from `BASE` on.

    With a residual the sum takes the place of x, and goes to `total` as well.
    """
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        values = x.index(BASE + part).load(LAYOUT)
        if RESIDUAL:
            values = (_wide(values) + _wide(r.index(BASE + part).load(LAYOUT))).to(x.dtype)
            x.index(BASE + part).store(values)
            gl.store(total + _cells(first + part * SLICE, width), values,
                     mask=_live(top, rows, first + part * SLICE + column, width, WHOLE))
        values = _wide(values)
        sums += values if CENTERED else values * values
    squares = gl.sum(sums, 1)
    mean = gl.zeros_like(squares)
    if CENTERED:
        mean = squares / gl.minimum(width - first, PARTS * SLICE).to(gl.float32)
        sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
        for part in gl.static_range(PARTS):
            values = _wide(x.index(BASE + part).load(LAYOUT)) - mean[:, None]
            if not WHOLE:
                values = gl.where((first + part * SLICE + column < width)[None, :], values, 0.0)
            sums += values * values
        squares = gl.sum(sums, 1)
    return mean, squares


@gluon.jit
def _hand_over(share, mean, squares):
    """Both numbers of each row as one word, so that who reads it reads both; -1 stands for no word yet."""
    word = (mean.to(gl.int32, bitcast=True).to(gl.int64) << 32) | squares.to(gl.uint32, bitcast=True).to(gl.int64)
    gl.atomic_xchg(share + gl.arange(0, 32, mean.type.layout), word, sem="relaxed")


@gluon.jit
def _joined(shares, columns, width, MEMBERS: gl.constexpr, CENTERED: gl.constexpr):
    """Statistics of whole rows from those of all members' columns (Chan, Golub and LeVeque), in the members' order."""
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    mean = gl.zeros([32], gl.float32, gl.SliceLayout(1, LAYOUT))
    squares = gl.zeros([32], gl.float32, gl.SliceLayout(1, LAYOUT))
    for member in gl.static_range(MEMBERS):
        word = gl.load(shares + member * 32 + row, volatile=True)
        while gl.max((word == -1).to(gl.int32), 0) > 0:
            word = gl.load(shares + member * 32 + row, volatile=True)
        theirs = (word & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)
        if CENTERED:
            middle = (word >> 32).to(gl.int32).to(gl.float32, bitcast=True)
            before = member * columns
            count = gl.minimum(width - before, columns).to(gl.float32)
            part = count / (before + count)
            theirs += (middle - mean) * (middle - mean) * (before * part)
            mean += (middle - mean) * part
        squares += theirs
    return mean, squares


@gluon.jit
def _cells(first, width):
    """Offsets of the elements of a slice that begins at column `first` from the first of its 32 rows."""
    local = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    return local[:, None] * width + (first + gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT)))[None, :]


@gluon.jit
def _live(top, rows, column, width, WHOLE: gl.constexpr):
    mask = (top + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT)) < rows)[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    return mask


@gluon.jit
def _quantize_rows(x, mean, rstd, weight, bias, data, scale, top, rows, first, width, CENTERED: gl.constexpr,
                   WEIGHT: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
                   BASE: gl.constexpr):
    """The second pass: normalise what lies in shared memory and store its blocks."""
    for part in gl.static_range(PARTS):
        start = first + part * SLICE
        column = start + gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
        y = _wide(x.index(BASE + part).load(LAYOUT))
        if CENTERED:
            y = y - mean[:, None]
        y = y * rstd[:, None]
        if WEIGHT:
            y = y * gl.load(weight + column, mask=column < width, other=0.0).to(gl.float32)[None, :]
        if BIAS:
            y = y + gl.load(bias + column, mask=column < width, other=0.0).to(gl.float32)[None, :]
        mask = _live(top, rows, column, width, WHOLE)
        if CENTERED or BIAS:
            y = gl.where(mask, y, 0.0)
        scaled, exponent = _quantized(y, x.dtype)
        gl.store(data + _cells(start, width), scaled, mask=mask)
        block = start // 32 + gl.arange(0, SLICE // 32, exponent.type.layout)
        gl.store(scale + block, exponent.to(gl.uint8), mask=(block < gl.cdiv(width, 32)) & (top < rows))


@gluon.jit
def _finish(x, mean, squares, weight, bias, data, scale, mean_out, rstd_out, top, rows, first, width, eps,
            CENTERED: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
            BASE: gl.constexpr):
    rstd = gl.rsqrt(squares / width + eps)
    row = top + gl.arange(0, 32, rstd.type.layout)
    if first == 0:
        gl.store(rstd_out + row, rstd, mask=row < rows)
        if CENTERED:
            gl.store(mean_out + row, mean, mask=row < rows)
    _quantize_rows(x, mean, rstd, weight, bias, data, scale, top, rows, first, width, CENTERED, WEIGHT, BIAS, PARTS,
                   WHOLE, BASE)


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, r_desc, weight, bias, data, scale, total, mean_out, rstd_out, shares, rows, width, eps,
                CENTERED: gl.constexpr, RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
                TILES: gl.constexpr, PARTS: gl.constexpr, MEMBERS: gl.constexpr, WHOLE: gl.constexpr):
    """`TILES` times 32 rows, of each the `PARTS` slices of columns that belong to this member of `MEMBERS`."""
    member, group = gl.program_id(0) % MEMBERS, gl.program_id(0) // MEMBERS * TILES
    first = member * (PARTS * SLICE)
    x = gl.allocate_shared_memory(x_desc.dtype, [TILES * PARTS, 32, SLICE], x_desc.layout)
    r = x
    if RESIDUAL:
        r = gl.allocate_shared_memory(x_desc.dtype, [TILES * PARTS, 32, SLICE], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(TILES):
        mbarrier.init(ready.index(tile), count=1)
    for tile in gl.static_range(TILES):
        mbarrier.expect(ready.index(tile), (2 if RESIDUAL else 1) * PARTS * x_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            at, slot = [(group + tile) * 32, first + part * SLICE], tile * PARTS + part
            tma.async_copy_global_to_shared(x_desc, at, ready.index(tile), x.index(slot))
            if RESIDUAL:
                tma.async_copy_global_to_shared(r_desc, at, ready.index(tile), r.index(slot))
    for tile in gl.static_range(TILES):
        block_row = (group + tile).to(gl.int64)
        top, base = (group + tile) * 32, block_row * 32 * width
        mbarrier.wait(ready.index(tile), 0)
        mean, squares = _statistics(x, r, total + base, top, rows, first, width, CENTERED, RESIDUAL, PARTS, WHOLE,
                                    tile * PARTS)
        if MEMBERS > 1:
            _hand_over(shares + (block_row * MEMBERS + member) * 32, mean, squares)
        else:
            _finish(x, mean, squares, weight, bias, data + base, scale + block_row * gl.cdiv(width, 32), mean_out,
                    rstd_out, top, rows, first, width, eps, CENTERED, WEIGHT, BIAS, PARTS, WHOLE, tile * PARTS)
    if MEMBERS > 1:
        for tile in gl.static_range(TILES):
            block_row = (group + tile).to(gl.int64)
            top, base = (group + tile) * 32, block_row * 32 * width
            mean, squares = _joined(shares + block_row * (MEMBERS * 32), PARTS * SLICE, width, MEMBERS, CENTERED)
            _finish(x, mean, squares, weight, bias, data + base, scale + block_row * gl.cdiv(width, 32), mean_out,
                    rstd_out, top, rows, first, width, eps, CENTERED, WEIGHT, BIAS, PARTS, WHOLE, tile * PARTS)
    for tile in gl.static_range(TILES):
        mbarrier.invalidate(ready.index(tile))


def _descriptor(x: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [32, SLICE.value], layout)


def _plan(slices: int, residual: bool) -> tuple[int, int]:
    """(tiles of 32 rows, slices of each) a program takes of rows of so many slices: what was fastest on an H200."""
    parts = min(2 if residual else 4, 1 << (slices - 1).bit_length())
    return 2 if parts == 1 and not residual else 1, parts


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_quantize_forward`; rows that do not start at 16 bytes, which TMA needs, go to Triton."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    if not aligned(x, *(() if residual is None else (residual,))):
        return portable.norm_quantize_forward(x, residual, weight, bias, eps, centered)
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = portable.row_outputs(x, residual, centered)
    if not rows:
        return data, scale, total, mean, rstd
    slices = -(-width // SLICE.value)
    tiles, parts = _plan(slices, residual is not None)
    groups, members = -(-scale.shape[0] // tiles), -(-slices // parts)
    shares = x.new_empty(0, dtype=torch.int64)
    if members > 1:
        shares = torch.full((groups * tiles * members * 32,), -1, dtype=torch.int64, device=x.device)
    tensors = [x if y is None else y.contiguous() for y in (residual, weight, bias)]
    present = (y is not None for y in (residual, weight, bias))
    launch(_forward_mx, (groups * members, 1, 1), kind_of(x, *tensors, facts=(width,)),
           (_descriptor(x), _descriptor(tensors[0]), *tensors[1:], data, scale, total, mean, rstd, shares, rows, width,
            eps), (centered, *present, tiles, parts, members, width % (SLICE.value * parts) == 0), warps=8)
    return data, scale, total, mean, rstd
