"""Norms fused with quantisation on Hopper in Gluon: 32 rows of x come by TMA and stay in shared memory for two passes.

A block of the quantised result spans 32 rows and its scale needs their statistics first, so every element is looked at
twice. Held in registers that is too few bytes under way; here a program keeps up to 64 KB in shared memory, three
programs share a multiprocessor, and while one computes the others load. Rows of more than 1,024 elements (512 with a
residual, which takes half of the room) are split between programs that hand each other their share of the statistics
through memory; they wait only for programs of the same 32 rows, which start together, and add the shares in order.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.launch import kind_of, launch

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
SLICE = gl.constexpr(256)  # columns a program works on at a time: a block of 32 for each of eight warps
SWIZZLE = 64
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
def _joined(share, mean, squares, columns, width, MEMBERS: gl.constexpr, CENTERED: gl.constexpr):
    """Statistics of whole rows from those of all members' columns (Chan, Golub and LeVeque), in the members' order."""
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    mine = (mean.to(gl.int32, bitcast=True).to(gl.int64) << 32) | squares.to(gl.uint32, bitcast=True).to(gl.int64)
    member = gl.program_id(0) % MEMBERS
    gl.atomic_xchg(share + member * 32 + row, mine, sem="relaxed")
    mean = gl.zeros_like(mean)
    squares = gl.zeros_like(squares)
    for other in gl.static_range(MEMBERS):
        got = gl.load(share + other * 32 + row, volatile=True)
        while gl.max((got == -1).to(gl.int32), 0) > 0:
            got = gl.load(share + other * 32 + row, volatile=True)
        theirs = (got & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)
        if CENTERED:
            middle = (got >> 32).to(gl.int32).to(gl.float32, bitcast=True)
            before = other * columns
            count = gl.minimum(width - before, columns).to(gl.float32)
            part = count / (before + count)
            theirs += (middle - mean) * (middle - mean) * (before * part)
            mean += (middle - mean) * part
        squares += theirs
    return mean, squares


@gluon.jit
def _live(row, rows, column, width, WHOLE: gl.constexpr):
    mask = (row < rows)[:, None]
    if not WHOLE:
        mask = mask & (column < width)[None, :]
    return mask


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, r_desc, weight, bias, data, scale, total, mean_out, rstd_out, shares, rows, width, eps,
                CENTERED: gl.constexpr, RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
                TILES: gl.constexpr, PARTS: gl.constexpr, MEMBERS: gl.constexpr, WHOLE: gl.constexpr):
    """`TILES` times 32 rows, of each `PARTS` slices of columns: those of this member of `MEMBERS`."""
    kind: gl.constexpr = x_desc.dtype
    group, member = gl.program_id(0) // MEMBERS, gl.program_id(0) % MEMBERS
    first = member * (PARTS * SLICE)
    x = gl.allocate_shared_memory(kind, [TILES * PARTS, 32, SLICE], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    if RESIDUAL:
        r = gl.allocate_shared_memory(kind, [TILES * PARTS, 32, SLICE], x_desc.layout)
    for tile in gl.static_range(TILES):
        mbarrier.init(ready.index(tile), count=1)
    for tile in gl.static_range(TILES):
        mbarrier.expect(ready.index(tile), (2 if RESIDUAL else 1) * PARTS * x_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            at = [(group * TILES + tile) * 32, first + part * SLICE]
            tma.async_copy_global_to_shared(x_desc, at, ready.index(tile), x.index(tile * PARTS + part))
            if RESIDUAL:
                tma.async_copy_global_to_shared(r_desc, at, ready.index(tile), r.index(tile * PARTS + part))
    local = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    offset = local[:, None] * width + column[None, :]
    used = gl.cdiv(width, 32)
    for tile in gl.static_range(TILES):
        block_row = (group * TILES + tile).to(gl.int64)
        row = (group * TILES + tile) * 32 + local
        base = block_row * 32 * width + first
        mbarrier.wait(ready.index(tile), 0)
        sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
        for part in gl.static_range(PARTS):
            values = x.index(tile * PARTS + part).load(LAYOUT)
            if RESIDUAL:
                added = _wide(values) + _wide(r.index(tile * PARTS + part).load(LAYOUT))
                values = added.to(kind)
                x.index(tile * PARTS + part).store(values)
                mask = _live(row, rows, first + part * SLICE + column, width, WHOLE)
                gl.store(total + base + part * SLICE + offset, values, mask=mask)
            values = _wide(values)
            if CENTERED:
                sums += values
            else:
                sums += values * values
        squares = gl.sum(sums, 1)
        mean = gl.zeros_like(squares)
        if CENTERED:
            mean = squares / gl.minimum(width - first, PARTS * SLICE).to(gl.float32)
            sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
            for part in gl.static_range(PARTS):
                values = _wide(x.index(tile * PARTS + part).load(LAYOUT)) - mean[:, None]
                if not WHOLE:
                    values = gl.where((first + part * SLICE + column < width)[None, :], values, 0.0)
                sums += values * values
            squares = gl.sum(sums, 1)
        if MEMBERS > 1:
            mean, squares = _joined(shares + block_row * (MEMBERS * 32), mean, squares, PARTS * SLICE, width, MEMBERS,
                                    CENTERED)
        rstd = gl.rsqrt(squares / width + eps)
        if member == 0:
            gl.store(rstd_out + row, rstd, mask=row < rows)
            if CENTERED:
                gl.store(mean_out + row, mean, mask=row < rows)
        for part in gl.static_range(PARTS):
            columns = first + part * SLICE + column
            y = _wide(x.index(tile * PARTS + part).load(LAYOUT))
            if CENTERED:
                y = y - mean[:, None]
            y = y * rstd[:, None]
            if WEIGHT:
                y = y * gl.load(weight + columns, mask=columns < width, other=0.0).to(gl.float32)[None, :]
            if BIAS:
                y = y + gl.load(bias + columns, mask=columns < width, other=0.0).to(gl.float32)[None, :]
            mask = _live(row, rows, columns, width, WHOLE)
            if CENTERED or BIAS:
                y = gl.where(mask, y, 0.0)
            scaled, exponent = _quantized(y, kind)
            gl.store(data + base + part * SLICE + offset, scaled, mask=mask)
            at = first // 32 + part * (SLICE // 32) + gl.arange(0, SLICE // 32, exponent.type.layout)
            gl.store(scale + block_row * used + at, exponent.to(gl.uint8), mask=(at < used) & (block_row * 32 < rows))
    for tile in gl.static_range(TILES):
        mbarrier.invalidate(ready.index(tile))


def _descriptor(x: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(SWIZZLE, 16, 2)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [32, SLICE.value], layout)


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool, slices: int | None = None,
                          registers: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_quantize_forward`."""
    from opengem.kernels.norm.triton import _row_outputs
    x = x.contiguous()
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = _row_outputs(x, residual, centered)
    if not rows:
        return data, scale, total, mean, rstd
    slices = slices or (4 if residual is None else 2)  # that fit
    wanted = -(-width // SLICE.value)
    parts = min(slices, 1 << (wanted - 1).bit_length())
    members, tiles = -(-wanted // parts), slices // parts
    groups = -(-scale.shape[0] // tiles)
    shares = torch.full((groups * 32 * members,), -1, dtype=torch.int64, device=x.device) if members > 1 else scale
    tensors = [x if y is None else y.contiguous() for y in (residual, weight, bias)]
    present = tuple(y is not None for y in (residual, weight, bias))
    launch(_forward_mx, (groups * members, 1, 1), kind_of(x, *tensors, shares, facts=(width,)),
           (_descriptor(x), _descriptor(tensors[0]), *tensors[1:], data, scale, total, mean, rstd, shares, rows, width,
            eps), (centered, *present, tiles, parts, members, width % (SLICE.value * parts) == 0), warps=8,
           registers=registers)
    return data, scale, total, mean, rstd
