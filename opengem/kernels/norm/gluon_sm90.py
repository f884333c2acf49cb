"""Norms fused with quantisation on Hopper in Gluon: 32 rows of x come by TMA and stay in shared memory for two passes.

A block of the quantised result spans 32 rows and its scale needs their statistics first, so every element is looked at
twice. Held in registers that is too few bytes under way; here a program keeps 32 or 64 KB in shared memory, several
programs share a multiprocessor, and while one computes the others load. Wider rows are split between the programs of a
thread block cluster. Each warp sends its sums of the 32 rows to every member of the cluster (itself in a cluster of
one) and all add them in one order, so they come to the same bits, every run. A sum goes by `st.async` straight into
the shared memory of the other, where a barrier counts the bytes: nobody polls memory. Triton has no words for another
program's shared memory, so that part is assembly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from opengem.kernels.launch import aligned, has_clusters, kind_of, launch
from opengem.kernels.norm import triton as portable

SLICE = gl.constexpr(256)  # columns a program works on at a time: a block of 32 for each of eight warps
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 8], [1, 0]))
BY_WARP = gl.constexpr(gl.BlockedLayout([1, 1, 8], [8, 1, 4], [1, 8, 1], [2, 1, 0]))  # the same of [32, 8, 32]
PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [1, 8], [1, 0]))  # the same, two columns an element
MEMBERS = 8  # most programs of a cluster that every GPU starts
SHARE = gl.constexpr(1024)  # bytes of a program's sums: of 32 rows by eight warps


@gluon.jit
def _wide(x):
    """x in fp32, an instruction each."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
                                         dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def _larger_bf16(a, b):
    return gl.inline_asm_elementwise("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def _larger_fp16(a, b):
    return gl.inline_asm_elementwise("max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def _halves(pair, KIND: gl.constexpr):
    """The two numbers of a word, in fp32."""
    if gl.bfloat16 == KIND:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [pair],
                                         dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; "
                                         "}", "=f,=f,r", [pair], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def _quantized(y, KIND: gl.constexpr):
    """(two E4M3 an int16 `[32, SLICE / 2]`, E8M0 exponents int32 `[SLICE / 32]`), as `mx.triton.quantize_tile`.

    Numbers go in pairs of neighbours, for which there are instructions that round them and compare their magnitudes.
    """
    even, odd = gl.split(gl.reshape(y, [32, SLICE // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == KIND else "cvt.rn.f16x2.f32 $0, $2, $1;"
    pairs = gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    pairs = gl.reshape(gl.permute(gl.reshape(pairs, [32, 8, 16]), (1, 0, 2)), [8, 512])
    largest = gl.reduce(pairs, 1, _larger_bf16 if gl.bfloat16 == KIND else _larger_fp16) & 0x7FFF7FFF
    low, high = _halves(largest, KIND)
    bits = gl.maximum(low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True))  # a NaN's are the largest
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.where(bits >= 0x7F800000, 255, gl.maximum(exponent, 0))
    inverse = (gl.where(exponent == 255, 127, 254 - exponent) << 23).to(gl.float32, bitcast=True)
    low, high = _halves(pairs, KIND)
    scaled = gl.inline_asm_elementwise(
        """{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $2;
        mov.b32 $0, {a, b}; }""", "=r,f,f,f,f", [low * inverse[:, None], high * inverse[:, None]], dtype=gl.int16,
        is_pure=True, pack=2)
    scaled = gl.permute(gl.reshape(scaled, [8, 32, 16]), (1, 0, 2))
    return gl.convert_layout(gl.reshape(scaled, [32, SLICE // 2]), PAIRS), exponent


@gluon.constexpr_function
def _open(exchanges, members):
    """Assembly: $0 is the address of a box for the sums of all members, after as many barriers that wait for them.

    The box is static shared memory. Its size is a multiple of what TMA wants of the tiles that come after it.
    """
    reserve = f".shared .align 1024 .b8 box[{(1 + exchanges * members) * SHARE.value}]; mov.u32 $0, box;"
    if members == 1:
        return f"{{ {reserve} }}"
    barrier = f"""@first mbarrier.init.shared::cta.b64 [$0 + {{at}}], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {{at}}], {members * SHARE.value};"""
    return f"""{{ {reserve} .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        {" ".join(barrier.format(at=8 * i) for i in range(exchanges))}
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; }}"""


@gluon.constexpr_function
def _exchange(which, members):
    """Assembly: $4-$7, a warp's sums of four rows, go to all members; $0-$3 become the sums of everyone's.

    $8: the box; $12: this member. Four neighbouring lanes hold the same rows. Each sends them to every fourth member
    and adds the shares of every fourth warp. A warp's eight slots of 16 bytes are turned by its number, so that lanes
    that read those of different warps meet no bank conflict.
    """
    base = (1 + which * members) * SHARE.value
    parts = [f"""{{ .reg .pred done, live; .reg .b32 lane, rows, slot, mine, turn, bar, to, far, farbar;
        .reg .f32 a, b, c, d; mov.u32 rows, %tid.x; and.b32 lane, rows, 3; shr.u32 slot, rows, 5;
        bfe.u32 rows, rows, 2, 3; and.b32 turn, slot, 3; shl.b32 turn, turn, 1; xor.b32 turn, rows, turn;
        shl.b32 slot, slot, 7; mad.lo.u32 slot, turn, 16, slot; mad.lo.u32 slot, $12, {SHARE.value}, slot;
        add.u32 slot, slot, $8; add.u32 bar, $8, {8 * which};"""]
    for first in range(0, members if members > 1 else 0, 4):
        parts.append(f"""add.u32 to, lane, {first}; setp.lt.u32 live, to, {members};
            @live mapa.shared::cluster.u32 far, slot, to; @live mapa.shared::cluster.u32 farbar, bar, to;
            @live st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [far + {base}], {{$4, $5, $6, $7}},
            [farbar];""")
    if members > 1:
        parts.append("again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again;")
    else:  # not launched in a cluster, so it may not send
        parts.append(f"""setp.eq.u32 live, lane, 0; @live st.shared.v4.f32 [slot + {base}], {{$4, $5, $6, $7}};
            bar.sync 0;""")
    parts.append("""shl.b32 turn, lane, 1; xor.b32 turn, rows, turn; shl.b32 mine, lane, 7;
        mad.lo.u32 mine, turn, 16, mine; add.u32 mine, mine, $8;
        mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; mov.f32 $3, $0;""")
    for place in range(base, base + members * SHARE.value, 512):
        parts.append(f"""ld.shared.v4.f32 {{a, b, c, d}}, [mine + {place}];
            add.f32 $0, $0, a; add.f32 $1, $1, b; add.f32 $2, $2, c; add.f32 $3, $3, d;""")
    for mask in (1, 2):
        parts += [f"shfl.sync.bfly.b32 a, ${out}, {mask}, 31, -1; add.f32 ${out}, ${out}, a;" for out in range(4)]
    return " ".join(parts) + " }"


@gluon.jit
def _totals(sums, box, member, WHICH: gl.constexpr, MEMBERS: gl.constexpr):
    """Sums over whole rows, of whose columns this program has summed `[32, SLICE]`; `[32, 8]`, equal for all warps."""
    return gl.inline_asm_elementwise(_exchange(WHICH, MEMBERS), "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r,r,r",
                                     [gl.sum(gl.reshape(sums, [32, 8, 32]), 2), box, member], dtype=gl.float32,
                                     is_pure=False, pack=4)


@gluon.jit
def _spread(total):
    """`[32, 8]` numbers of rows to all columns `[32, SLICE]`."""
    wide, _ = gl.broadcast(total[:, :, None], gl.zeros([32, 8, 32], gl.float32, BY_WARP))
    return gl.convert_layout(gl.reshape(wide, [32, SLICE]), LAYOUT)


@gluon.jit
def _store_rows(out, total, top, rows):
    row = top + gl.arange(0, 32, gl.SliceLayout(1, total.type.layout))
    warp = gl.arange(0, 8, gl.SliceLayout(0, total.type.layout))
    gl.store(out + row[:, None] + warp[None, :] * 0, total, mask=(row < rows)[:, None] & (warp == 0)[None, :])


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
        values = _wide(x[BASE + part].load(LAYOUT)) - mean
        if not WHOLE:
            values = gl.where((first + part * SLICE + column < width)[None, :], values, 0.0)
        sums += values * values
    return sums


@gluon.jit
def _store_blocks(data, scale, scaled, exponent, top, rows, start, width, WHOLE: gl.constexpr):
    row = gl.arange(0, 32, gl.SliceLayout(1, PAIRS))
    pair = start // 2 + gl.arange(0, SLICE // 2, gl.SliceLayout(0, PAIRS))
    mask = (top + row < rows)[:, None]
    if not WHOLE:
        mask = mask & (pair < width // 2)[None, :]
    data = data.to(gl.pointer_type(gl.int16), bitcast=True)
    gl.store(data + row[:, None] * (width // 2) + pair[None, :], scaled, mask=mask)
    block = start // 32 + gl.arange(0, SLICE // 32, exponent.type.layout)
    gl.store(scale + block, exponent.to(gl.uint8), mask=(block < gl.cdiv(width, 32)) & (top < rows))


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
            y = y - mean
        y = y * rstd
        if WEIGHT:
            y = y * gl.load(weight + column, mask=column < width, other=0.0).to(gl.float32)[None, :]
        if BIAS:
            y = y + gl.load(bias + column, mask=column < width, other=0.0).to(gl.float32)[None, :]
        mask = _live(top, rows, column, width, WHOLE)
        if CENTERED or BIAS:
            y = gl.where(mask, y, 0.0)
        scaled, exponent = _quantized(y, x[0].dtype)
        _store_blocks(data, scale, scaled, exponent, top, rows, start, width, WHOLE)


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
    box = gl.inline_asm_elementwise(_open(TILES * EACH, MEMBERS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for tile in gl.static_range(TILES):
        block_row = (group + tile).to(gl.int64)
        top, base = (group + tile) * 32, block_row * 32 * width
        sums = _sums(x, r, total + base, ready, top, rows, first, width, CENTERED, RESIDUAL, PARTS, WHOLE, tile * PARTS)
        squares = _totals(sums, box, member, tile * EACH, MEMBERS)
        mean = squares
        if CENTERED:
            mean = squares / width
            if first == 0:
                _store_rows(mean_out, mean, top, rows)
            mean = _spread(mean)
            sums = _squares(x, mean, first, width, PARTS, WHOLE, tile * PARTS)
            squares = _totals(sums, box, member, tile * EACH + 1, MEMBERS)
        rstd = gl.rsqrt(squares / width + eps)
        if first == 0:
            _store_rows(rstd_out, rstd, top, rows)
        _quantize_rows(x, mean, _spread(rstd), weight, bias, data + base, scale + block_row * gl.cdiv(width, 32), top,
                       rows, first, width, CENTERED, WEIGHT, BIAS, PARTS, WHOLE, tile * PARTS)
    for slot in gl.static_range(SLOTS):
        mbarrier.invalidate(ready[slot])


def _descriptor(x: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [32, SLICE.value], layout)


def _plan(slices: int, residual: bool) -> tuple[int, int, int]:
    """(tiles of 32 rows, slices of each) a program takes of rows of so many slices, and programs of a cluster.

    What was fastest on an H200, but for more members than any GPU has to start together: then all are as large as fit.
    """
    parts = min(2 if residual and slices <= 2 * MEMBERS else 4, 1 << (slices - 1).bit_length())
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
