"""Norms fused with quantisation on Hopper in Gluon: 32 rows of x come by TMA and stay in shared memory for two passes.

A block of the quantised result spans 32 rows and its scale needs their statistics first, so every element is looked at
twice. Rows that are wider than a program's room are split between the programs of a thread block cluster, which write
their sums into each other's shared memory.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from opengem.kernels.launch import aligned, kind_of, launch
from opengem.kernels.norm import triton as portable
from benchmarks.ladder.norm_old import (
    LAYOUT,
    SLICE,
    _cells,
    _descriptor,
    _live,
    _quantized,
    _wide,
)

BARRIERS = gl.constexpr(1024)  # bytes before the sums, which come 1,024 at a time: what follows keeps its alignment


@gluon.constexpr_function
def _open(exchanges, members, share):
    """Assembly: reserve the box, make its barriers wait for the sums of all members, tell the cluster."""
    size = 1024 + -(-exchanges * members * share // 1024) * 1024
    if members == 1:
        return f"{{ .shared .align 1024 .b8 box[{size}]; mov.u32 $0, box; }}"
    one = f"""@first mbarrier.init.shared::cta.b64 [$0 + {{at}}], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {{at}}], {members * share};"""
    return f"""{{ .shared .align 1024 .b8 box[{size}]; .reg .pred first; .reg .b32 thread;
        mov.u32 $0, box; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        {" ".join(one.format(at=8 * i) for i in range(exchanges))}
        barrier.cluster.arrive.relaxed.aligned; }}"""


@gluon.constexpr_function
def _exchange(which, members, by_warp):
    """Assembly: four rows' sums of this warp (or, in its first warp, this program) to all members; the sums of theirs.

    In: $4-$7 the sums, $8 the box, $12 this member. Four neighbouring lanes hold the same rows: each sends them to one
    member in four, and adds the shares of one warp in four.
    """
    share, barrier = 1024 if by_warp else 128, 8 * which
    base = 1024 + which * members * share
    lines = ["""{ .reg .pred live, done; .reg .b32 thread, lane, warp, group, slot, bar, to, far, farbar;
        .reg .f32 a, b, c, d; .reg .b32 mine;
        mov.u32 thread, %tid.x; and.b32 lane, thread, 3; shr.u32 warp, thread, 5;"""]
    if by_warp:
        # 16 bytes a slot; the order of a warp's eight slots turns with the warp, so that readers meet no bank conflict
        lines.append("""bfe.u32 group, thread, 2, 3; and.b32 slot, warp, 3; shl.b32 slot, slot, 1;
            xor.b32 group, group, slot; shl.b32 slot, warp, 7; shl.b32 group, group, 4; add.u32 slot, slot, group;""")
    else:
        lines.append("bfe.u32 group, thread, 2, 3; shl.b32 slot, group, 4;")
    lines.append(f"mad.lo.u32 slot, $12, {share}, slot; add.u32 slot, slot, $8; add.u32 bar, $8, {barrier};")
    if members == 1:  # a program that was not launched in a cluster may not send
        lines.append(f"setp.eq.u32 live, lane, 0; @live st.shared.v4.f32 [slot + {base}], {{$4, $5, $6, $7}}; bar.sync 0;")
    for turn in range(0, members if members > 1 else 0, 4):
        live = [] if by_warp and members - turn >= 4 else [f"setp.lt.u32 live, lane, {min(4, members - turn)};"]
        if not by_warp:
            live.append("setp.lt.and.u32 live, thread, 32, live;")
        guard = "@live " if live else ""
        lines.append(f"""{" ".join(live)} add.u32 to, lane, {turn};
            {guard}mapa.shared::cluster.u32 far, slot, to; {guard}mapa.shared::cluster.u32 farbar, bar, to;
            {guard}st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [far + {base}], {{$4, $5, $6, $7}},
            [farbar];""")
    if by_warp:
        lines.append("""bfe.u32 group, thread, 2, 3; shl.b32 slot, lane, 1; xor.b32 group, group, slot;
            shl.b32 group, group, 4; shl.b32 mine, lane, 7; add.u32 mine, mine, group; add.u32 mine, mine, $8;""")
    else:
        lines.append("shl.b32 mine, group, 4; add.u32 mine, mine, $8;")
    if members > 1:
        lines.append("again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again;")
    lines.append("""mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; mov.f32 $3, $0;""")
    for place in range(base, base + members * share, 512 if by_warp else 128):
        lines.append(f"""ld.shared.v4.f32 {{a, b, c, d}}, [mine + {place}];
            add.f32 $0, $0, a; add.f32 $1, $1, b; add.f32 $2, $2, c; add.f32 $3, $3, d;""")
    if by_warp:
        for mask in (1, 2):
            for out in range(4):
                lines.append(f"shfl.sync.bfly.b32 a, ${out}, {mask}, 31, -1; add.f32 ${out}, ${out}, a;")
    return " ".join(lines) + " }"


@gluon.jit
def _totals(sums, box, member, WHICH: gl.constexpr, MEMBERS: gl.constexpr, BY_WARP: gl.constexpr):
    """Sums over whole rows of which this program holds `sums` `[32, SLICE]`: `[32, 8]` or `[32]`."""
    if BY_WARP:
        sums = gl.sum(gl.reshape(sums, [32, 8, 32]), 2)
    else:
        sums = gl.sum(sums, 1)
        if MEMBERS == 1:
            return sums
    return gl.inline_asm_elementwise(_exchange(WHICH, MEMBERS, BY_WARP), "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r,r,r",
                                     [sums, box, member], dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def _spread(total, BY_WARP: gl.constexpr):
    """A number of each row for all its columns."""
    if BY_WARP:
        wide, _ = gl.broadcast(gl.expand_dims(total, 2), gl.zeros([32, 8, 32], gl.float32, gl.BlockedLayout([1, 1, 8], [8, 1, 4], [1, 8, 1], [2, 1, 0])))
        return gl.convert_layout(gl.reshape(wide, [32, SLICE]), LAYOUT)
    else:
        return gl.expand_dims(total, 1)


@gluon.jit
def _store_row(out, value, top, rows, BY_WARP: gl.constexpr):
    if BY_WARP:
        row = top + gl.arange(0, 32, gl.SliceLayout(1, value.type.layout))
        warp = gl.arange(0, 8, gl.SliceLayout(0, value.type.layout))
        gl.store(out + row[:, None] + warp[None, :] * 0, value, mask=(row < rows)[:, None] & (warp == 0)[None, :])
    else:
        row = top + gl.arange(0, 32, value.type.layout)
        gl.store(out + row, value, mask=row < rows)


@gluon.jit
def _sums(x, r, total, ready, top, rows, first, width, CENTERED: gl.constexpr, RESIDUAL: gl.constexpr,
          PARTS: gl.constexpr, WHOLE: gl.constexpr, BASE: gl.constexpr, EACH: gl.constexpr):
    """Sums (of squares, unless CENTERED) over the slices from `BASE` on, `[32, SLICE]`, as they come.

    With a residual the sum takes the place of x, and goes to `total` as well.
    """
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([32, SLICE], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        if part % EACH == 0:
            mbarrier.wait(ready[(BASE + part) // EACH], 0)
        values = x[BASE + part].load(LAYOUT)
        if RESIDUAL:
            values = (_wide(values) + _wide(r[BASE + part].load(LAYOUT))).to(x[0].dtype)
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


PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [1, 8], [1, 0]))  # two columns an element


@gluon.jit
def _larger_pair(a, b):
    return gl.inline_asm_elementwise("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def _quantized_pairs(y):
    """As `_quantized`, in bf16, two columns at a time: (int16 `[32, SLICE / 2]`, exponents)."""
    even, odd = gl.split(gl.reshape(y, [32, SLICE // 2, 2]))
    pairs = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32,
                                      is_pure=True, pack=1)
    pairs = gl.reshape(gl.permute(gl.reshape(pairs, [32, 8, 16]), (1, 0, 2)), [8, 512])
    largest = gl.reduce(pairs, 1, _larger_pair) & 0x7FFF7FFF
    bits = gl.maximum(largest << 16, largest & 0x7FFF0000)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.where(bits >= 0x7F800000, 255, gl.maximum(exponent, 0))
    inverse = gl.where(exponent == 255, 127, 254 - exponent) << 7
    inverse = inverse | inverse << 16
    pairs, inverse = gl.broadcast(pairs, inverse[:, None])
    scaled = gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, a, b, c, d; .reg .b16 e, f; mul.bf16x2 p, $1, $3; mul.bf16x2 q, $2, $4;
        shl.b32 a, p, 16; and.b32 b, p, 0xffff0000; shl.b32 c, q, 16; and.b32 d, q, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 e, b, a; cvt.rn.satfinite.e4m3x2.f32 f, d, c; mov.b32 $0, {e, f}; }""",
        "=r,r,r,r,r", [pairs, inverse], dtype=gl.int16, is_pure=True, pack=2)
    scaled = gl.permute(gl.reshape(scaled, [8, 32, 16]), (1, 0, 2))
    return gl.convert_layout(gl.reshape(scaled, [32, SLICE // 2]), PAIRS), exponent


@gluon.jit
def _store_pairs(data, scaled, top, rows, start, width, WHOLE: gl.constexpr):
    row = gl.arange(0, 32, gl.SliceLayout(1, PAIRS))
    pair = start // 2 + gl.arange(0, SLICE // 2, gl.SliceLayout(0, PAIRS))
    mask = (top + row < rows)[:, None]
    if not WHOLE:
        mask = mask & (pair < width // 2)[None, :]
    gl.store(data.to(gl.pointer_type(gl.int16), bitcast=True) + row[:, None] * (width // 2) + pair[None, :], scaled,
             mask=mask)


@gluon.jit
def _quantize_rows(x, mean, rstd, weight, bias, data, scale, top, rows, first, width, CENTERED: gl.constexpr,
                   WEIGHT: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
                   BASE: gl.constexpr, PACKED: gl.constexpr):
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
        if PACKED:
            scaled, exponent = _quantized_pairs(y)
            _store_pairs(data, scaled, top, rows, start, width, WHOLE)
        else:
            scaled, exponent = _quantized(y, x[0].dtype)
            gl.store(data + _cells(start, width), scaled, mask=mask)
        block = start // 32 + gl.arange(0, SLICE // 32, exponent.type.layout)
        gl.store(scale + block, exponent.to(gl.uint8), mask=(block < gl.cdiv(width, 32)) & (top < rows))


@gluon.jit(do_not_specialize=["rows"])
def _forward_mx(x_desc, r_desc, weight, bias, data, scale, total, mean_out, rstd_out, rows, width, eps,
                CENTERED: gl.constexpr, RESIDUAL: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
                TILES: gl.constexpr, PARTS: gl.constexpr, MEMBERS: gl.constexpr, WHOLE: gl.constexpr,
                EARLY: gl.constexpr, BY_WARP: gl.constexpr, PACKED: gl.constexpr):
    """`TILES` times 32 rows, of each the `PARTS` slices of columns that belong to this member of `MEMBERS`."""
    member, group = gl.program_id(0) % MEMBERS, gl.program_id(0) // MEMBERS * TILES
    first = member * (PARTS * SLICE)
    ROUNDS: gl.constexpr = 2 if CENTERED else 1
    EACH: gl.constexpr = 1 if EARLY else PARTS  # slices a barrier waits for
    x, r, ready = (), (), ()  # allocations of their own: the compiler orders accesses to one by barriers of all threads
    for _ in gl.static_range(TILES * PARTS):
        x = x + (gl.allocate_shared_memory(x_desc.dtype, [32, SLICE], x_desc.layout),)
        if RESIDUAL:
            r = r + (gl.allocate_shared_memory(x_desc.dtype, [32, SLICE], x_desc.layout),)
    for _ in gl.static_range(TILES * PARTS // EACH):
        ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for at in gl.static_range(TILES * PARTS // EACH):
        mbarrier.init(ready[at], count=1)
    for at in gl.static_range(TILES * PARTS // EACH):
        mbarrier.expect(ready[at], (2 if RESIDUAL else 1) * EACH * x_desc.block_type.nbytes)
    for slot in gl.static_range(TILES * PARTS):
        at = [(group + slot // PARTS) * 32, first + slot % PARTS * SLICE]
        tma.async_copy_global_to_shared(x_desc, at, ready[slot // EACH], x[slot])
        if RESIDUAL:
            tma.async_copy_global_to_shared(r_desc, at, ready[slot // EACH], r[slot])
    box = gl.inline_asm_elementwise(_open(TILES * ROUNDS, MEMBERS, 1024 if BY_WARP else 128), "=r", [], dtype=gl.int32,
                                    is_pure=False, pack=1)
    if MEMBERS > 1:
        gl.inline_asm_elementwise("barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)
    for tile in gl.static_range(TILES):
        block_row = (group + tile).to(gl.int64)
        top, base = (group + tile) * 32, block_row * 32 * width
        sums = _sums(x, r, total + base, ready, top, rows, first, width, CENTERED, RESIDUAL, PARTS, WHOLE, tile * PARTS,
                     EACH)
        squares = _totals(sums, box, member, tile * ROUNDS, MEMBERS, BY_WARP)
        mean = squares
        if CENTERED:
            mean = squares / width
            if first == 0:
                _store_row(mean_out, mean, top, rows, BY_WARP)
            mean = _spread(mean, BY_WARP)
            sums = _squares(x, mean, first, width, PARTS, WHOLE, tile * PARTS)
            squares = _totals(sums, box, member, tile * ROUNDS + 1, MEMBERS, BY_WARP)
        rstd = gl.rsqrt(squares / width + eps)
        if first == 0:
            _store_row(rstd_out, rstd, top, rows, BY_WARP)
        _quantize_rows(x, mean, _spread(rstd, BY_WARP), weight, bias, data + base,
                       scale + block_row * gl.cdiv(width, 32), top, rows, first, width, CENTERED, WEIGHT, BIAS, PARTS,
                       WHOLE, tile * PARTS, PACKED)
    for at in gl.static_range(TILES * PARTS // EACH):
        mbarrier.invalidate(ready[at])


def norm_quantize_forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                          centered: bool, tiles: int = 1, parts: int = 4, early: bool = True, by_warp: bool = True, packed: bool = False,
                          registers: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    rows, width = x.shape
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-rows // 32), -(-width // 32)), dtype=torch.uint8)
    total, mean, rstd = portable.row_outputs(x, residual, centered)
    if not rows:
        return data, scale, total, mean, rstd
    slices = -(-width // SLICE.value)
    groups, members = -(-scale.shape[0] // tiles), -(-slices // parts)
    tensors = [x if y is None else y.contiguous() for y in (residual, weight, bias)]
    present = (y is not None for y in (residual, weight, bias))
    launch(_forward_mx, (groups, 1, 1), kind_of(x, *tensors, facts=(width,)),
           (_descriptor(x), _descriptor(tensors[0]), *tensors[1:], data, scale, total, mean, rstd, rows, width, eps),
           (centered, *present, tiles, parts, members, width % (SLICE.value * parts) == 0, early, by_warp, packed and x.dtype == torch.bfloat16), warps=8,
           registers=registers, cluster=members)
    return data, scale, total, mean, rstd
