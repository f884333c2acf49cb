"""Check every memory-bound kernel against its reference on this GPU and sweep launch options.

    python benchmarks/ladder/mem_check.py --out FILE.jsonl [--only block norm ...] [--timeout 90]

Every section runs in its own process under a timeout, so that a crash or a hang costs one section. A line holds the
section, the configuration, milliseconds, GB/s and the share of the device copy; or, of a check, the largest errors
against the reference in fp64, relative to its largest value, of the kernel and of plain PyTorch in 16 bit. The rule is
that of FlashAttention's tests: the kernel's error is at most twice (gradients: three times) that of plain PyTorch. For
attention plain PyTorch means one operation at a time, each result rounded; the reference itself keeps fp32 to the end
and rounds once, which no kernel on 16-bit tensor cores can.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from opengem.kernels import backend
from opengem.kernels.block import cost as block_cost
from opengem.kernels.block import gluon_sm90
from opengem.kernels.block import triton as portable
from opengem.kernels.block.op import block_attention
from opengem.kernels.jagged_ops import op as jagged
from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm import triton as norm
from opengem.kernels.norm.op import layer_norm, rms_norm
from opengem.kernels.rope import triton as rope
from opengem.kernels.rope.op import apply_rope, rope_tables
from opengem.kernels.swiglu import triton as swiglu_kernels
from opengem.kernels.swiglu.op import swiglu

EDGES = ([], [0, 0, 0], [1], [1, 1], [3, 0, 5, 0, 0, 2], [63, 64, 65], [127, 128, 129], [1, 700, 0, 2, 1, 3])
DEVICE, KIND = "cuda", torch.bfloat16


def milliseconds(function: Callable[[], object]) -> float:
    """Median of single runs with the L2 overwritten before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(4):
        function()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(15)]
    for first, last in marks:
        flush.zero_()
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks)


def copy_gbs() -> float:
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


def speed(function: Callable[[], object], moved: int, copy: float) -> dict:
    took = milliseconds(function)
    return {"ms": round(took, 4), "gbs": round(moved / took / 1e6), "of_copy": round(moved / took / 1e6 / copy, 3)}


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=KIND).requires_grad_(grad)


def results_of(call: Callable[..., Tensor], kind: str, inputs: tuple[Tensor, ...], seed: Tensor) -> list[Tensor]:
    """Output and gradients with the given implementation of the ops."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with backend.force(kind):
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def compare(call: Callable[..., Tensor], *inputs: Tensor, plain: Callable[..., Tensor] | None = None,
            kind: str = "triton") -> dict:
    """Largest relative errors of output and gradients against fp64: ours, and `plain` (by default the reference)."""
    with torch.no_grad(), backend.force("reference"):
        seed = torch.randn(call(*inputs).shape, device=DEVICE).to(KIND)
    exact = results_of(call, "reference", tuple(x.double() for x in inputs), seed)
    ours = results_of(call, kind, inputs, seed)
    other = results_of(plain or call, "reference", inputs, seed)
    lines = []
    for index, triple in enumerate(zip(exact, ours, other, strict=True)):
        if triple[0].numel():
            scale = triple[0].abs().max().clamp_min(1e-9)
            mine, theirs = (float((x.double() - triple[0]).abs().max() / scale) for x in triple[1:])
            lines.append((mine, theirs, mine <= (3 if index else 2) * theirs + 1e-4))
    return {"ok": all(line[2] for line in lines), "ours": [round(line[0], 5) for line in lines],
            "plain": [round(line[1], 5) for line in lines]}


# ---- block attention ---------------------------------------------------------------------------------------------


def block_rope(dim: int, rotation: bool | None, positions: int) -> tuple | None:
    return None if rotation is None else (*rope_tables(positions, dim, device=DEVICE), rotation)


def plain_blocks(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], rope: tuple | None) -> Tensor:
    """Block attention one operation at a time, every result rounded to the dtype of q."""
    if rope is not None:
        q, k = (apply_rope(x, starts(lengths), *rope[:2], interleaved=rope[2]) for x in (q, k))
    outs, begin = [(q[:0] + k[:0] + v[:0])], 0
    for length in lengths:
        for first in range(begin, begin + length, 64):
            tile = slice(first, min(first + 64, begin + length))
            scores = q[tile].transpose(0, 1) @ k[tile].permute(1, 2, 0) * q.shape[2] ** -0.5
            p = torch.softmax(scores.float(), -1).to(q.dtype)
            outs.append((p @ v[tile].transpose(0, 1)).transpose(0, 1))
        begin += length
    return torch.cat(outs)


def section_block_check(copy: float) -> Iterator[dict]:
    for dim in (64, 128):
        for rotation in (None, False, True):
            for lengths in EDGES:
                tables, offsets, size = block_rope(dim, rotation, 800), starts(lengths), max(lengths, default=0)
                inputs = [normal(sum(lengths), 3, dim) for _ in range(3)]
                for kind in ("gluon", "triton"):
                    found = compare(
                        lambda q, k, v, o=offsets, t=tables, m=size: block_attention(q, k, v, o, max_length=m, rope=t),
                        *inputs, plain=lambda q, k, v, n=lengths, t=tables: plain_blocks(q, k, v, n, t), kind=kind)
                    yield {"dim": dim, "rope": rotation, "lengths": lengths, "kind": kind} | found


def block_sweep(dim: int, rotation: bool | None, direction: str, copy: float) -> Iterator[dict]:
    from benchmarks.kernels.block import HEADS, LONGEST
    from benchmarks.kernels.block import lengths as make_lengths

    lengths = make_lengths().tolist()
    rows, offsets, tables = sum(lengths), starts(lengths), block_rope(dim, rotation, LONGEST)
    q, key, v = (normal(rows, HEADS, dim) for _ in range(3))
    cos, sin = (q.new_empty(0, 1, dtype=torch.float32),) * 2 if tables is None else tables[:2]
    tail = (offsets, cos, sin, LONGEST, 64, dim**-0.5, bool(rotation))
    grad = normal(rows, HEADS, dim)
    forward = direction == "forward"
    moved = block_cost.bytes(rows, HEADS, dim) if forward else block_cost.backward_bytes(rows, HEADS, dim)
    for name, kernels in (("gluon", gluon_sm90), ("triton", portable)):
        run = (lambda k=kernels: k.block_forward(q, key, v, *tail)) if forward else (
            lambda k=kernels: k.block_backward(grad, q, key, v, *tail))
        yield {"kind": name, "direction": direction, "dim": dim, "rope": rotation} | speed(run, moved, copy)


def section_block_forward(copy: float) -> Iterator[dict]:
    for rotation in (None, False, True):
        yield from block_sweep(128, rotation, "forward", copy)


def section_block_backward(copy: float) -> Iterator[dict]:
    for rotation in (None, False, True):
        yield from block_sweep(128, rotation, "backward", copy)


def section_block_d64(copy: float) -> Iterator[dict]:
    for rotation in (None, False):
        yield from block_sweep(64, rotation, "forward", copy)
        yield from block_sweep(64, rotation, "backward", copy)


# ---- norms, rope, swiglu, quantisation ---------------------------------------------------------------------------


def section_norm_check(copy: float) -> Iterator[dict]:
    for call in (rms_norm, layer_norm):
        for rows, width in ((1, 64), (33, 384), (7, 1000), (3000, 256), (3, 8192)):
            yield {"check": call.__name__, "shape": [rows, width]} | compare(
                lambda x, w, b, c=call: c(x, w, b), normal(rows, width), normal(width), normal(width))


def section_norm(copy: float) -> Iterator[dict]:
    for width in (256, 512, 1024, 2048, 4096):
        rows = (1 << 28) // width
        x, r, w, size = normal(rows, width), normal(rows, width), torch.randn(width, device=DEVICE), 2 << 28
        yield {"width": width, "op": "rms"} | speed(lambda x=x, w=w: rms_norm(x, w), 2 * size, copy)
        yield {"width": width, "op": "rms_residual"} | speed(
            lambda x=x, w=w, r=r: rms_norm(x, w, residual=r), 4 * size, copy)
        for stages in (2, 3, 4):
            norm.QUANTIZED_STAGES = stages
            yield {"width": width, "op": "rms_quantize", "stages": stages} | speed(
                lambda x=x, w=w: rms_norm(x, w, quantize="e4m3"), size + size // 2, copy)
        yield {"width": width, "op": "quantize"} | speed(lambda x=x: quantize_mx(x), size + size // 2, copy)
        statistic = torch.ones(rows, device=DEVICE)
        for stages in (1, 2, 3, 4):
            for programs in (2, 4):
                norm.BACKWARD_STAGES, norm.BACKWARD_PROGRAMS = stages, programs
                line = {"width": width, "op": "rms_backward", "stages": stages, "programs": programs}
                yield line | speed(
                    lambda x=x, r=r, w=w, s=statistic: norm.norm_backward(r, None, x, w, s[:0], s, False),
                    3 * size, copy)


def section_rope(copy: float) -> Iterator[dict]:
    from benchmarks.kernels.block import HEADS, LONGEST
    from benchmarks.kernels.block import lengths as make_lengths

    tables = {dim: rope_tables(LONGEST, dim, device=DEVICE) for dim in (64, 128)}
    for interleaved in (False, True):
        for edge in EDGES:
            offsets = starts(edge)
            yield {"check": "rope", "interleaved": interleaved, "lengths": edge} | compare(
                lambda x, o=offsets, i=interleaved: apply_rope(x, o, *tables[64], interleaved=i),
                normal(sum(edge), 3, 64))
    lengths = make_lengths().tolist()
    for dim in (128, 64):
        x, offsets = normal(sum(lengths), HEADS, dim), starts(lengths)
        for interleaved in (False, True):
            for tile in (2048, 4096):
                rope.TILE = tile
                yield {"dim": dim, "interleaved": interleaved, "tile": tile} | speed(
                    lambda x=x, o=offsets, t=tables[dim], i=interleaved: apply_rope(x, o, *t, interleaved=i),
                    4 * x.numel(), copy)


def section_swiglu(copy: float) -> Iterator[dict]:
    for rows, width in ((1, 8), (33, 1000), (5, 4096)):
        yield {"check": "swiglu", "shape": [rows, width]} | compare(swiglu, normal(rows, 2 * width))
    for width in (1024, 4096):
        x, grad = normal((1 << 28) // width // 2, 2 * width), normal((1 << 28) // width // 2, width)
        for tile in (1024, 2048):
            swiglu_kernels.TILE = tile
            yield {"op": "forward", "width": width, "tile": tile} | speed(
                lambda x=x: swiglu_kernels.swiglu_forward(x), 6 * grad.numel(), copy)
            yield {"op": "backward", "width": width, "tile": tile} | speed(
                lambda x=x, g=grad: swiglu_kernels.swiglu_backward(g, x), 10 * grad.numel(), copy)


# ---- jagged copies -----------------------------------------------------------------------------------------------


def section_jagged_check(copy: float) -> Iterator[dict]:
    for edge in EDGES:
        offsets, size, rows = starts(edge), max(edge, default=0) + 1, sum(edge)
        index = torch.randint(0, max(1, rows), (2 * rows,), device=DEVICE)
        x = normal(rows, 96)
        for name, call, inputs in (
            ("pad", lambda x, o=offsets, s=size: jagged.jagged_to_padded(x, o, s), [x]),
            ("concat", lambda x, y, o=offsets: jagged.concat_jagged(x, y, o, o)[0], [x, x]),
            ("gather", lambda x, i=index: jagged.gather_rows(x, i), [x]),
            ("add", lambda x, d, o=offsets: jagged.broadcast_add(x, d, o), [x, normal(len(edge), 96)]),
            ("bmm", lambda x, w, o=offsets, s=size: jagged.jagged_dense_bmm(x, w, o, max_length=s),
             [x, normal(len(edge), 96, 80)]),
        ):
            yield {"check": name, "lengths": edge} | compare(call, *inputs)


def section_jagged(copy: float) -> Iterator[dict]:
    from benchmarks.kernels.jagged import cases

    for case in cases():
        inputs = case.make(torch.device(DEVICE), 0)
        with torch.no_grad():
            line = speed(lambda c=case, i=inputs: c.ours(*i), case.fwd_bytes, copy)
        out, leaves = case.ours(*inputs), [x for x in inputs if x.requires_grad]
        grad = torch.randn_like(out)
        back = speed(lambda o=out, l=leaves, g=grad: torch.autograd.grad(o, l, g, retain_graph=True),
                     case.bwd_bytes, copy)
        yield {"op": case.name} | line | {f"bwd_{k}": v for k, v in back.items()}


SECTIONS = {name.removeprefix("section_"): value for name, value in list(globals().items())
            if name.startswith("section_")}


def child(name: str) -> None:
    torch.manual_seed(0)
    copy = copy_gbs()
    print(json.dumps({"section": name, "copy_gbs": round(copy)}), flush=True)
    for line in SECTIONS[name](copy):
        print(json.dumps({"section": name} | line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--timeout", type=float, default=90)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        command = [sys.executable, __file__, "--child", name]
        with open(options.out, "a") as file:
            try:
                done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, timeout=options.timeout,
                                      env=os.environ)
                problem = None if done.returncode == 0 else done.stderr[-1500:]
            except subprocess.TimeoutExpired:
                problem = f"no end within {options.timeout} s"
            if problem:
                file.write(json.dumps({"section": name, "error": problem}) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
