"""Norms fused with quantisation on Hopper in Gluon: 32 rows of x come by TMA and stay in shared memory for two passes.

A block of the quantised result spans 32 rows and its scale needs their statistics first, so every element is looked at
twice. Held in registers that is too few bytes under way; here a program keeps 32 or 64 KB in shared memory, several
programs share a multiprocessor, and while one computes the others load. Rows of more than 1,024 elements (512 with a
residual, which takes half of the room) are split between the programs of a thread block cluster: each sends its sums of
the 32 rows to every member, itself included, and all add them in the same order, so that they come to the same bits,
every run. A sum goes by `st.async` straight into the shared memory of the other, where a barrier counts the bytes:
nobody polls memory. Triton has no words for another program's shared memory, so that part is assembly.
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

from opengem.kernels.launch import aligned, described, has_clusters, kind_of, launch
from opengem.kernels.norm import triton as portable

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
SLICE = gl.constexpr(256)  # columns a program works on at a time: a block of 32 for each of eight warps
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 8], [1, 0]))
SHARE = gl.constexpr(128)  # bytes of the sums of 32 rows
BOX = gl.constexpr(1024)  # a multiple of what TMA wants of the tiles that lie behind the box
CLUSTER = 8  # most programs of a cluster that every GPU starts


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


@gluon.constexpr_function
def _open(exchanges, members):
    """Assembly: $0 is the address of a box: barriers that wait for the sums of all members, and behind them the sums.

    The box is static shared memory, which comes before all that Triton allocates.
    """
    size = -(-(BOX.value + exchanges * members * SHARE.value) // BOX.value) * BOX.value
    barrier = f"""@first mbarrier.init.shared::cta.b64 [$0 + {{at}}], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {{at}}], {members * SHARE.value};"""
    return f"""{{ .shared .align {BOX.value} .b8 box[{size}]; .reg .pred first; .reg .b32 thread;
        mov.u32 $0, box; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        {" ".join(barrier.format(at=8 * i) for i in range(exchanges))}
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; }}"""


@gluon.constexpr_function
def _exchange(which, members):
    """Assembly: $4-$7, this program's sums of four rows, go to all members; $0-$3 become the sums of all.

    $8: the box; $12: this member. All warps hold the same, and so do four neighbouring lanes: those of the first warp
    send to every fourth member each. Nobody sends here once all have, so a program may end when it has read its box.
    """
    base = BOX.value + which * members * SHARE.value
    parts = [f"""{{ .reg .pred done, live; .reg .b32 thread, lane, mine, slot, bar, to, far, farbar;
        .reg .f32 a, b, c, d; mov.u32 thread, %tid.x; and.b32 lane, thread, 3; bfe.u32 mine, thread, 2, 3;
        mad.lo.u32 mine, mine, 16, $8;
        mad.lo.u32 slot, $12, {SHARE.value}, mine; add.u32 bar, $8, {8 * which};"""]
    for first in range(0, members, 4):
        parts.append(f"""add.u32 to, lane, {first}; setp.lt.u32 live, to, {members};
            setp.lt.and.u32 live, thread, 32, live;
            @live mapa.shared::cluster.u32 far, slot, to; @live mapa.shared::cluster.u32 farbar, bar, to;
            @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [far + {base}], {{$4, $5, $6, $7}},
            [farbar];""")
    parts.append("""again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again;
        mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; mov.f32 $3, $0;""")
    for place in range(base, base + members * SHARE.value, SHARE.value):
        parts.append(f"""ld.shared.v4.f32 {{a, b, c, d}}, [mine + {place}];
            add.f32 $0, $0, a; add.f32 $1, $1, b; add.f32 $2, $2, c; add.f32 $3, $3, d;""")
    return " ".join(parts) + " }"


@gluon.jit
def _totals(sums, box, member, WHICH: gl.constexpr, MEMBERS: gl.constexpr):
    """Sums of the 32 rows whose elements all members have summed in `sums` `[32, SLICE]`."""
    total = gl.sum(sums, 1)
    if MEMBERS > 1:
        total = gl.inline_asm_elementwise(_exchange(WHICH, MEMBERS), "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r,r,r",
                                          [total, box, member], dtype=gl.float32, is_pure=False, pack=4)
    return total


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
def _sums(x, r, total, ready, top, rows, first, width, CENTERED: gl.constexpr, RESIDUAL: gl.constexpr,
          PARTS: gl.constexpr, WHOLE: gl.constexpr, BASE: gl.constexpr):
    """Sums (of squares, unless CENTERED) over the slices from `BASE` on, `[32, SLICE]`, as they come.

    With a residual the sum takes the place of x, and goes to `total` as well.
    """
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        mbarrier.wait(ready[BASE + part], 0)
        values = x[BASE + part].load(LAYOUT)
        if RESIDUAL:
            values = (_wide(values) + _wide(r[BASE + part].load(LAYOUT))).to(values.dtype)
            x[BASE + part].store(values)
            gl.store(total + _cells(first + part * SLICE, width), values,
                     mask=_live(top, rows, first + part * SLICE + column, width, WHOLE))
        values = _wide(values)
        sums += values if CENTERED else values * values
    return sums


@gluon.jit
def _squares(x, mean, first, width, PARTS: gl.constexpr, WHOLE: gl.constexpr, BASE: gl.constexpr):
    """Sums of squares about the mean, `[32, SLICE]`."""
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        values = _wide(x[BASE + part].load(LAYOUT)) - mean[:, None]
        if not WHOLE:
            values = gl.where((first + part * SLICE + column < width)[None, :], values, 0.0)
        sums += values * values
    return sums


@gluon.jit
def _quantize_rows(x, mean, rstd, weight, bias, data, scale, top, rows, first, width, CENTERED: gl.constexpr,
                   WEIGHT: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
                   BASE: gl.constexpr):
    """The second pass: normalise what lies in shared memory and store its blocks."""
    for part in gl.static_range(PARTS):
        start = first + part * SLICE
        column = start + gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
        y = _wide(x[BASE + part].load(LAYOUT))
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
        scaled, exponent = _quantized(y, x[BASE + part].dtype)
        gl.store(data + _cells(start, width), scaled, mask=mask)
        block = start // 32 + gl.arange(0, SLICE // 32, exponent.type.layout)
        gl.store(scale + block, exponent.to(gl.uint8), mask=(block < gl.cdiv(width, 32)) & (top < rows))


@gluon.jit
def _store_rows(out, value, top, rows):
    row = top + gl.arange(0, 32, value.type.layout)
    gl.store(out + row, value, mask=row < rows)


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, r_desc, weight, bias, data, scale, total, mean_out, rstd_out, rows, width, eps,
                CENTERED: gl.constexpr, RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
                TILES: gl.constexpr, PARTS: gl.constexpr, MEMBERS: gl.constexpr, WHOLE: gl.constexpr):
    """`TILES` times 32 rows, of each the `PARTS` slices of columns that belong to this member of `MEMBERS`."""
    member, group = gl.program_id(0) % MEMBERS, gl.program_id(0) // MEMBERS * TILES
    first = member * (PARTS * SLICE)
    SLOTS: gl.constexpr = TILES * PARTS
    EACH: gl.constexpr = 2 if CENTERED else 1  # exchanges a tile
    x, r, ready = (), (), ()  # an allocation each: between accesses to one the compiler makes all threads wait
    for _ in gl.static_range(SLOTS):
        x = x + (gl.allocate_shared_memory(x_desc.dtype, [32, SLICE], x_desc.layout),)
        ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        if RESIDUAL:
            r = r + (gl.allocate_shared_memory(x_desc.dtype, [32, SLICE], x_desc.layout),)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready[slot], count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.expect(ready[slot], (2 if RESIDUAL else 1) * x_desc.block_type.nbytes)
    for slot in gl.static_range(SLOTS):
        at = [(group + slot // PARTS) * 32, first + slot % PARTS * SLICE]
        tma.async_copy_global_to_shared(x_desc, at, ready[slot], x[slot])
        if RESIDUAL:
            tma.async_copy_global_to_shared(r_desc, at, ready[slot], r[slot])
    box = 0
    if MEMBERS > 1:
        box = gl.inline_asm_elementwise(_open(TILES * EACH, MEMBERS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for tile in gl.static_range(TILES):
        block_row = (group + tile).to(gl.int64)
        top, base = (group + tile) * 32, block_row * 32 * width
        sums = _sums(x, r, total + base, ready, top, rows, first, width, CENTERED, RESIDUAL, PARTS, WHOLE, tile * PARTS)
        joined = _totals(sums, box, member, tile * EACH, MEMBERS)
        mean = joined / width
        if CENTERED:
            if first == 0:
                _store_rows(mean_out, mean, top, rows)
            sums = _squares(x, mean, first, width, PARTS, WHOLE, tile * PARTS)
            joined = _totals(sums, box, member, tile * EACH + 1, MEMBERS)
        rstd = gl.rsqrt(joined / width + eps)
        if first == 0:
            _store_rows(rstd_out, rstd, top, rows)
        _quantize_rows(x, mean, rstd, weight, bias, data + base, scale + block_row * gl.cdiv(width, 32), top,
                       rows, first, width, CENTERED, WEIGHT, BIAS, PARTS, WHOLE, tile * PARTS)
    for slot in gl.static_range(SLOTS):
        mbarrier.invalidate(ready[slot])


def _descriptor(x: Tensor) -> TensorDescriptor:
    return described(_slices(x.shape[1], x.dtype), x, shape=list(x.shape))


@functools.cache
def _slices(width: int, dtype: torch.dtype) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return TensorDescriptor(torch.empty(0, dtype=dtype), [32, width], [width, 1], [32, SLICE.value], layout)


def _plan(slices: int, residual: bool) -> tuple[int, int, int]:
    """(tiles of 32 rows, slices of each) a program takes of rows of so many slices, and programs of a cluster.

    What was fastest on an H200, but for more members than any GPU has to start together: then all are as large as fit.
    """
    parts = min(2 if residual and slices <= 2 * CLUSTER else 4, 1 << (slices - 1).bit_length())
    return 2 if parts == 1 and not residual else 1, parts, -(-slices // parts)


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `reference.norm_quantize_forward`; rows that do not start at 16 bytes, which TMA needs, go to Triton.

    So do rows too wide for one program where Triton is a version that cannot be told to launch clusters.
    """
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    slices = -(-x.shape[1] // SLICE.value)
    tiles, parts, members = _plan(slices, residual is not None)
    if not aligned(x, *(() if residual is None else (residual,))) or members > 1 and not has_clusters():
        return portable.norm_quantize_forward(x, residual, weight, bias, eps, centered)
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = portable.row_outputs(x, residual, centered)
    if not rows:
        return data, scale, total, mean, rstd
    tensors = [x if y is None else y.contiguous() for y in (residual, weight, bias)]
    present = (y is not None for y in (residual, weight, bias))
    launch(_forward_mx, (-(-scale.shape[0] // tiles), 1, 1), kind_of(x, *tensors, facts=(width,)),
           (_descriptor(x), _descriptor(tensors[0]), *tensors[1:], data, scale, total, mean, rstd, rows, width, eps),
           (centered, *present, tiles, parts, members, width % (SLICE.value * parts) == 0), warps=8, cluster=members)
    return data, scale, total, mean, rstd
