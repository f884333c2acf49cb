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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.launch import kind_of, launch, multiprocessors
from opengem.kernels.norm import triton as portable

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
SWIZZLE = 64


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
def _quantized(y, KIND: gl.constexpr, SLICE: gl.constexpr, LAYOUT: gl.constexpr):
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
    row = gl.arange(0, 32, mean.type.layout)
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


@gluon.jit
def _fetch(x_desc, r_desc, x, r, ready, step, tile, stride, first, PARTS: gl.constexpr, SLOTS: gl.constexpr,
           RESIDUAL: gl.constexpr):
    """Slice number `step` of this program, counted over its tiles, on its way to its slot."""
    slot = step % SLOTS
    at = [(tile + step // PARTS * stride) * 32, first + step % PARTS * x_desc.block_type.shape[1]]
    mbarrier.expect(ready.index(slot), (2 if RESIDUAL else 1) * x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, at, ready.index(slot), x.index(slot))
    if RESIDUAL:
        tma.async_copy_global_to_shared(r_desc, at, ready.index(slot), r.index(slot))


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, r_desc, weight, bias, data, scale, total, mean_out, rstd_out, shares, rows, width, eps,
                CENTERED: gl.constexpr, RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
                SLICE: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, MEMBERS: gl.constexpr,
                WHOLE: gl.constexpr):
    """Tiles of 32 rows, of each the `PARTS` slices of columns that belong to this member of `MEMBERS`."""
    kind: gl.constexpr = x_desc.dtype
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, SLICE // 32], [1, 0])
    member, tile, stride = gl.program_id(0) % MEMBERS, gl.program_id(0) // MEMBERS, gl.num_programs(0) // MEMBERS
    first = member * (PARTS * SLICE)
    steps = gl.cdiv(gl.cdiv(rows, 32) - tile, stride) * PARTS
    x = gl.allocate_shared_memory(kind, [SLOTS, 32, SLICE], x_desc.layout)
    r = x
    if RESIDUAL:
        r = gl.allocate_shared_memory(kind, [SLOTS, 32, SLICE], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(ready.index(n), count=1)
    for n in gl.static_range(SLOTS):
        if n < steps:
            _fetch(x_desc, r_desc, x, r, ready, n, tile, stride, first, PARTS, SLOTS, RESIDUAL)
    local = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    offset = local[:, None] * width + column[None, :]
    used = gl.cdiv(width, 32)
    for step in range(0, steps, PARTS):
        block_row = (tile + step // PARTS * stride).to(gl.int64)
        row = (tile + step // PARTS * stride) * 32 + local
        base = block_row * 32 * width + first
        sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
        for part in gl.static_range(PARTS):
            slot = (step + part) % SLOTS
            mbarrier.wait(ready.index(slot), (step + part) // SLOTS & 1)
            values = x.index(slot).load(LAYOUT)
            if RESIDUAL:
                values = (_wide(values) + _wide(r.index(slot).load(LAYOUT))).to(kind)
                x.index(slot).store(values)
                mask = _live(row, rows, first + part * SLICE + column, width, WHOLE)
                gl.store(total + base + part * SLICE + offset, values, mask=mask)
            values = _wide(values)
            sums += values if CENTERED else values * values
        squares = gl.sum(sums, 1)
        mean = gl.zeros_like(squares)
        if CENTERED:
            mean = squares / gl.minimum(width - first, PARTS * SLICE).to(gl.float32)
            sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
            for part in gl.static_range(PARTS):
                values = _wide(x.index((step + part) % SLOTS).load(LAYOUT)) - mean[:, None]
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
            y = _wide(x.index((step + part) % SLOTS).load(LAYOUT))
            if step + part + SLOTS < steps:
                if RESIDUAL:
                    fence_async_shared()
                _fetch(x_desc, r_desc, x, r, ready, step + part + SLOTS, tile, stride, first, PARTS, SLOTS, RESIDUAL)
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
            scaled, exponent = _quantized(y, kind, SLICE, LAYOUT)
            gl.store(data + base + part * SLICE + offset, scaled, mask=mask)
            at = first // 32 + part * (SLICE // 32) + gl.arange(0, SLICE // 32, exponent.type.layout)
            gl.store(scale + block_row * used + at, exponent.to(gl.uint8), mask=at < used)
    for n in gl.static_range(SLOTS):
        mbarrier.invalidate(ready.index(n))


def _descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [32, columns], gl.NVMMASharedLayout(SWIZZLE, 16, 2))


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool, plan: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_quantize_forward`."""
    x = x.contiguous()
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = portable.row_outputs(x, residual, centered)
    if not rows:
        return data, scale, total, mean, rstd
    warps, slots, most, ctas, registers = plan
    columns = 32 * warps
    wanted = -(-width // columns)
    parts = min(most, 1 << (wanted - 1).bit_length())
    slots = max(slots, parts)
    members = -(-wanted // parts)
    tiles = scale.shape[0]
    groups = min(tiles, ctas * multiprocessors(x.device) // members) if ctas else tiles
    if not ctas:
        slots = parts
    shares = torch.full((tiles * 32 * members,), -1, dtype=torch.int64, device=x.device) if members > 1 else scale
    tensors = [x if y is None else y.contiguous() for y in (residual, weight, bias)]
    present = tuple(y is not None for y in (residual, weight, bias))
    launch(_forward_mx, (groups * members, 1, 1), kind_of(x, *tensors, shares, facts=(width,)),
           (_descriptor(x, columns), _descriptor(tensors[0], columns), *tensors[1:], data, scale, total, mean, rstd,
            shares, rows, width, eps),
           (centered, *present, columns, parts, slots, members, width % (columns * parts) == 0), warps=warps,
           registers=registers)
    return data, scale, total, mean, rstd
