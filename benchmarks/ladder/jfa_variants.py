"""Variants of the Hopper backward of jagged flash attention, made by patches of the package's source, on one GPU.

    python -m benchmarks.ladder.jfa_variants check p4,p8       equal to the package's kernel, repeatable
    python -m benchmarks.ladder.jfa_variants time p4,p8        in turn with it, the L2 overwritten

onemask: as before, one mask for what is past the end, after or before what a query sees.
twoarrivals: as before, a tile is freed and its sum announced by two arrivals.
deadbarriers: as before, the kernel of few queries makes barriers that nobody waits for.
p4, p8: every fourth or eighth exponential by a polynomial on the FMA pipes (relative error 8.6e-5).
nofence, noadd: without a part; results may be wrong, the time tells what it costs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.ladder.jfa_check import CASES, EDGES, MASKS, emit, machine, median_ms
from opengem.kernels.jfa.reference import Options

TWO_ARRIVALS = [
    ("        if EAGER:\n            mbarrier.arrive(empty.index(at), count=1)\n        else:\n",
     "        mbarrier.arrive(empty.index(at), count=1)\n        if not EAGER:\n"),
    ("empty, STAGES, HAS_LEFT or not HAS_RIGHT", "empty, STAGES, False"),
]
DEAD_BARRIERS = [("        if not DEALT:  # a barrier", "        if True:  # a barrier")]
NO_FENCE = [("            fence.acq_rel.gpu;\n", "")]
NO_ADDING = [("gl.where(flags & LAST != 0, 2, gl.where(flags & FRESH != 0, 0, 1))", "gl.where(flags >= 0, 2, 2)")]
EXPONENTIAL = "        p = gl.exp2(s * scale2 - lse2[None, :])\n"
MIXED = '''

@gluon.constexpr_function
def _mixed(pack):
    """PTX of `pack` powers of two; the last by a polynomial on [0, 1), whose exponent is then raised."""
    last, given = pack - 1, 2 * pack - 1
    return "\\n".join([
        "{", ".reg .f32 x, whole, part, p;", ".reg .b32 high, bits;",
        *(f"ex2.approx.ftz.f32 ${i}, ${pack + i};" for i in range(last)),
        f"max.ftz.f32 x, ${given}, 0fC2FE0000;", "add.rm.ftz.f32 whole, x, 0f4B400000;",
        "sub.rn.ftz.f32 part, whole, 0f4B400000;", "sub.rn.ftz.f32 part, x, part;",
        "fma.rn.ftz.f32 p, part, 0f3D9DD565, 0f3E691BBB;", "fma.rn.ftz.f32 p, p, part, 0f3F31F32D;",
        "fma.rn.ftz.f32 p, p, part, 0f3F800000;", "mov.b32 high, whole;", "shl.b32 high, high, 23;",
        "mov.b32 bits, p;", "add.s32 bits, bits, high;", f"mov.b32 ${last}, bits;", "}"])


@gluon.constexpr_function
def _mixed_operands(pack):
    return ",".join(["=&f"] * pack + ["f"] * pack)


@gluon.jit
def _consume('''


def polynomial(pack: int) -> list[tuple[str, str]]:
    """Every `pack`th exponential on the FMA pipes."""
    call = (f"        p = gl.inline_asm_elementwise(_mixed({pack}), _mixed_operands({pack}), "
            f"[s * scale2 - lse2[None, :]], gl.float32,\n            is_pure=True, pack={pack})\n")
    return [(EXPONENTIAL, call), ("\n\n@gluon.jit\ndef _consume(", MIXED)]


ONE_MASK = [
    ("        p = visible(p, flags, steps, notes, at, left, right, HAS_LEFT, HAS_RIGHT, QUERIES)\n", """\
        if flags & (PAST + AFTER + BEFORE) != 0:
            first = get(notes, 8 * at + 2, 8)
            key = steps.load(gl.SliceLayout(1, s_layout))
            step = first + steps.slice(0, QUERIES).load(gl.SliceLayout(0, s_layout))
            seen = (key < get(notes, 8 * at + 3, 8))[:, None]
            if HAS_RIGHT:
                seen = seen & (key[:, None] <= step[None, :] + right)
            if HAS_LEFT:
                seen = seen & (key[:, None] >= step[None, :] - left)
            p = gl.where(seen, p, 0.0)
"""),
    ("    visible,\n)", "    visible,\n    PAST, AFTER, BEFORE,\n)"),
]


@dataclass(frozen=True)
class Variant:
    """Patches of the module with the products and of `gluon_sm90_turns`."""

    patches: tuple = ()
    turn_patches: tuple = ()
    exact: bool = True  # same sums in the same order: equal bits are wanted


VARIANTS = {
    "package": Variant(), "onemask": Variant(tuple(ONE_MASK)), "twoarrivals": Variant(tuple(TWO_ARRIVALS)),
    "deadbarriers": Variant(tuple(DEAD_BARRIERS)), "p4": Variant(tuple(polynomial(4)), exact=False),
    "p8": Variant(tuple(polynomial(8)), exact=False), "nofence": Variant(turn_patches=tuple(NO_FENCE)),
    "noadd": Variant(tuple(NO_ADDING)),
}


@functools.cache
def build(name: str):
    """The module of the package with the patches of `name`, each of which must fit in one place."""
    from opengem.kernels.jfa import gluon_sm90_backward, gluon_sm90_turns

    variant = VARIANTS[name]
    turns = written(f"jfa_turns_{name}", inspect.getsource(gluon_sm90_turns), variant.turn_patches).__name__
    switch = ("from opengem.kernels.jfa.gluon_sm90_turns import", f"from {turns} import")
    return written(f"jfa_variant_{name}", inspect.getsource(gluon_sm90_backward), (switch, *variant.patches))


def written(name: str, text: str, patches: Sequence[tuple[str, str]]):
    """The module of this text, patched."""
    for old, new in patches:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} places for {old!r}, wanted 1")
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# ---- checks ----------------------------------------------------------------------------------------------------

FEW = ([64, 0, 1, 63, 65, 3, 250, 16] * 40, [1000, 600, 1, 127, 129, 0, 512, 1300] * 40)


def inputs(q_lengths: list[int], kv_lengths: list[int], dim: int, mask, group: int = 1) -> tuple:
    """(positional arguments of `backward`, lengths and options included) behind a forward of the package."""
    from opengem.kernels.jfa import gluon_sm90

    generator = torch.Generator("cuda").manual_seed(0)
    rows, kv_rows = sum(q_lengths), sum(kv_lengths)
    q, dout, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in (
        (rows, 4, dim), (rows, 4, dim), (kv_rows, 4 // group, dim), (kv_rows, 4 // group, dim)))
    offsets = [torch.tensor([0, *n]).cumsum(0).to("cuda", torch.int32) for n in (q_lengths, kv_lengths)]
    left, right = mask.window or (-1, -1)
    options = Options(dim**-0.5, left, 0 if mask.causal else right)
    most = max(q_lengths), max(kv_lengths)
    out, lse = gluon_sm90.forward(q, k, v, *offsets, None, *most, options)
    return dout, None, q, k, v, out, lse, *offsets, None, *most, options


def finish(name: str, seconds: float = 10) -> None:
    """Wait for the GPU; end the process if a kernel hangs, so that it does not keep the GPU from others."""
    done, end = torch.cuda.Event(), time.time() + seconds
    done.record()
    while not done.query():
        if time.time() > end:
            emit(hangs=name)
            os._exit(3)
        time.sleep(0.01)


def compare(name: str, given: tuple, repeats: int, **about) -> bool:
    """Whether `name` repeats its bits and agrees with the package's kernel (bit by bit where that is wanted)."""
    from opengem.kernels.jfa import gluon_sm90_backward as package

    want = package.backward(*given)[:3]
    got = build(name).backward(*given)[:3]
    finish(name)
    same = all(torch.equal(a, b) for _ in range(repeats)
               for a, b in zip(got, build(name).backward(*given)[:3], strict=True))
    equal = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    gap = max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))
              for a, b in zip(got, want, strict=True))
    good = same and (equal if VARIANTS[name].exact else gap < 2e-3)
    emit(check=name, **about, ok=good, repeatable=same, equal=equal, gap=gap)
    return good


def check(name: str, dim: int, mask: str) -> bool:
    """Edge lengths, also with few blocks so that items queue, and (where all is seen) few queries of many keys."""
    from opengem.kernels.jfa import gluon_sm90_backward as package

    module, good = build(name), True
    usual = package.multiprocessors
    for blocks in (0, 7):
        for each in (module, package):
            each.multiprocessors = (lambda device: 7) if blocks else usual
        for at, (q_lengths, kv_lengths) in enumerate([*EDGES, *([FEW] if mask == "full" else [])]):
            few = mask != "full" and 2 * max(q_lengths) < max(kv_lengths or q_lengths)  # another kernel to compile
            if not few and 0 not in (sum(q_lengths), sum(kv_lengths or q_lengths)):
                given = inputs(q_lengths, kv_lengths or q_lengths, dim, MASKS[mask], group=2)
                good &= compare(name, given, 1, dim=dim, mask=mask, lengths=at, blocks=blocks)
    return good


def large(name: str, words: list[str]) -> bool:
    """Whole benchmark cases."""
    good = True
    for case, (lengths, _, dim, mask) in CASES.items():
        if not words or any(word in case for word in words):
            lengths = lengths()
            good &= compare(name, inputs(lengths, lengths, dim, mask), 5, case=case)
    return good


# ---- time ------------------------------------------------------------------------------------------------------


def times(names: list[str], words: list[str], rounds: int = 3) -> None:
    """Milliseconds of the backward alone, all variants in turn, several times."""
    from opengem.kernels.jfa import cost

    machine()
    for case, (make_lengths, _, dim, mask) in CASES.items():
        if words and not any(word in case for word in words):
            continue
        lengths = make_lengths()
        given = inputs(lengths, lengths, dim, mask)
        flops = 2.5 * cost.flops(lengths, lengths, 4, dim, causal=mask.causal, window=mask.window)
        for name in names:
            build(name).backward(*given)
            finish(name)
        for turn in range(rounds):
            for name in names:
                ms, low, high = median_ms(functools.partial(build(name).backward, *given), repeats=9)
                emit(time=name, case=case, round=turn, bwd_ms=ms, bwd_tflops=flops / ms / 1e9, spread=[low, high])
        del given
    machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["check", "large", "time"])
    parser.add_argument("names", help="variants, separated by commas")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--mask", choices=list(MASKS), default="full")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of names of cases")
    given = parser.parse_args()
    names, start, good = given.names.split(","), time.time(), True
    if given.work == "time":
        times(names, given.cases)
    else:
        for name in names:
            good &= check(name, given.dim, given.mask) if given.work == "check" else large(name, given.cases)
    print(f"{given.work} {given.names}: {'good' if good else 'BAD'}, {time.time() - start:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
