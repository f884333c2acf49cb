"""Variants of the Hopper GDPA kernels: right (one process each), then timed side by side in one process.

    python -m benchmarks.ladder.gdpa_variants check VARIANT --out FILE.jsonl
    python -m benchmarks.ladder.gdpa_variants stress VARIANT --out FILE.jsonl [--cases WORD ...]
    python -m benchmarks.ladder.gdpa_variants time --out FILE.jsonl [--plan forward|backward] [--of VARIANT,...]
    python -m benchmarks.ladder.gdpa_variants pipes --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# name -> (settings of launch.py, activation put in place of the asked one)
FORWARD = {
    "forward": ({}, None),
    "unfolded": ({"FOLDED": ()}, None),
    "identity": ({"FOLDED": ()}, "identity"),
    "poly": ({"FOLDED": ()}, "gelu_poly"),
}
BACKWARD = {
    "owner": ({"OWNER_KEYS": 1 << 30}, None),
    "turns": ({"OWNER_KEYS": 0}, None),
    "owner_identity": ({"OWNER_KEYS": 1 << 30, "FOLDED": ()}, "identity"),
    "turns_identity": ({"OWNER_KEYS": 0, "FOLDED": ()}, "identity"),
}
CASES = ("gdpa_self2048_fill1", "gdpa_self2048_fill.5", "gdpa_self1024_fill.5", "gdpa_self512_fill.5",
         "gdpa_self256_fill.5", "gdpa_cross256x256_fill.5", "gdpa_cross512x256_fill.5", "gdpa_cross1024x256_fill.5",
         "gdpa_cross2048x256_fill.5")


def emit(out: str, row: dict) -> None:
    print(json.dumps(row)[:240], flush=True)
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")


def apply(settings: dict, activation: str | None) -> None:
    from opengem.kernels.gdpa import launch

    if not hasattr(launch, "first"):
        launch.unchanged = launch.launch
        names = ("OWNER_KEYS", "FOLDED", "STREAM", "RESIDENT", "RESIDENT_SHORT")
        launch.first = {name: getattr(launch, name) for name in names}
    for name, value in (launch.first | settings).items():
        setattr(launch, name, value)

    def replaced(kernel, grid, key, arguments, constants, *rest, **options):
        if activation:
            constants = tuple(activation if x == "gelu_tanh" else x for x in constants)
        return launch.unchanged(kernel, grid, key, arguments, constants, *rest, **options)

    launch.launch = replaced


def check(name: str, out: str) -> int:
    from benchmarks.ladder.gdpa_check import check_all, first_checks
    from opengem.kernels import backend

    settings, activation = (FORWARD | BACKWARD)[name]
    apply(settings, activation)
    if activation:
        checks = [(activation, [3, 66, 200], [300, 70, 129], 128, 0, activation)]
    else:
        lengths = [1024, 1000, 65, 64, 3, 0, 700, 2049, 512, 129, 256, 257]
        checks = [("long", lengths, lengths, 128), ("long cross", lengths, lengths[::-1], 128),
                  ("short queries", [130] * 9, lengths[3:], 128)]
        checks += [c for c in first_checks() if len(c) < 5 or not c[4]]
    with backend.force("gluon"):
        good = check_all(name, out, checks)
    emit(out, {"variant": name, "good": good, "checks": len(checks)})
    return 0 if good else 1


def stress(name: str, out: str, words: list[str]) -> int:
    """A variant on whole benchmark cases, three times: equal bits, and near what the Triton kernels give."""
    import torch

    from benchmarks.kernels.gdpa import cases
    from opengem.kernels import backend

    good = True
    for case in [c for c in cases() if c.name in CASES and (not words or any(w in c.name for w in words))]:
        inputs = case.make(torch.device("cuda"), 0)
        leaves = [x for x in inputs if x.requires_grad]
        runs = []
        for kind in ("triton", "gluon", "gluon", "gluon"):
            apply(*(FORWARD | BACKWARD)[name])
            with backend.force(kind):
                result = case.ours(*inputs)
                grad = torch.randn(result.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
                runs.append([result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))])
        errors = [float((x.float() - y.float()).norm() / x.float().norm()) for x, y in zip(*runs[:2], strict=True)]
        same = all(torch.equal(x, y) for again in runs[2:] for x, y in zip(runs[1], again, strict=True))
        good &= same and max(errors) <= 5e-3
        emit(out, {"variant": name, "case": case.name, "errors": errors, "same": same})
        del inputs, leaves, runs, result, grad
        torch.cuda.empty_cache()
    emit(out, {"variant": name, "good": good})
    return 0 if good else 1


def clock(run) -> float | None:
    """The mean clock of the multiprocessors in GHz while `run` runs 8 times: cycles over nanoseconds."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def stamp(out):
        zero = tl.arange(0, 1)
        at = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1)
        now = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1)
        when = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [zero], dtype=tl.int64, is_pure=False,
                                         pack=1)
        tl.store(out + 2 * at, now)
        tl.store(out + 2 * at + 1, when)

    marks = torch.zeros(2, 256, 2, dtype=torch.int64, device="cuda")
    stamp[(528,)](marks[0])
    for _ in range(8):
        run()
    stamp[(528,)](marks[1])
    spent = (marks[1] - marks[0])[(marks != 0).all(0).all(1)].double()
    return float((spent[:, 0] / spent[:, 1]).median()) if len(spent) else None


def warm(names: list[str]) -> None:
    """Compile variants on a small input."""
    import torch

    from benchmarks.kernels import gdpa as bench
    from opengem.kernels import backend

    case = bench._attention("warm", 4, 512, 512, 0.5)
    with backend.force("gluon"):
        for name in names:
            apply(*(FORWARD | BACKWARD)[name])
            inputs = case.make(torch.device("cuda"), 0)
            case.ours(*inputs).sum().backward()
            torch.cuda.synchronize()
            print(f"warm {name}", flush=True)


def times(plan: str, names: list[str], out: str, words: list[str]) -> None:
    import torch

    from benchmarks import run
    from benchmarks.kernels.gdpa import cases
    from opengem.kernels import backend

    run.WARMUP_S, run.TARGET_S = 0.06, 0.12
    device = torch.device("cuda")
    table = FORWARD if plan == "forward" else BACKWARD
    emit(out, run.ceilings(device))
    with backend.force("gluon"):
        for case in [c for c in cases() if c.name in CASES and (not words or any(w in c.name for w in words))]:
            inputs = case.make(device, 0)
            for name in names:
                apply(*table[name])
                row = {"variant": name, "plan": plan, "case": case.name}
                try:
                    emit(out, row | time_one(plan, case, inputs))
                except Exception as problem:  # noqa: BLE001  one variant must not hide the others
                    emit(out, row | {"error": str(problem)[:300]})
            del inputs
            torch.cuda.empty_cache()


def time_one(plan: str, case, inputs: tuple) -> dict:
    import torch

    from benchmarks import run

    result = case.ours(*inputs)
    if plan == "forward":
        work, flops, moved = partial(case.ours, *inputs), case.fwd_flops, case.fwd_bytes
    else:
        leaves = [x for x in inputs if x.requires_grad]
        work = partial(torch.autograd.grad, result, leaves, torch.randn_like(result), retain_graph=True)
        flops, moved = case.bwd_flops, case.bwd_bytes
    with torch.set_grad_enabled(plan != "forward"):
        ms, spread = run.timed(work)
        ghz = clock(work)
    return {"ms": ms, "spread": spread, "tflops": flops / ms / 1e9, "gbs": moved / ms / 1e6, "ghz": ghz}


def pipes(out: str) -> None:
    """Results a multiprocessor and clock of instructions that an activation is made of, taking fma as 128."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def spin(x_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, ROUNDS: tl.constexpr):
        at = tl.arange(0, 2048)
        x = tl.load(x_ptr + at)
        for _ in range(ROUNDS):
            x = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [x], dtype=tl.float32, is_pure=True, pack=1)
        tl.store(x_ptr + at, x)

    kinds = {
        "fma": "fma.rn.f32 $0, $1, $1, $1;", "mul": "mul.f32 $0, $1, 0f3F7FFFFF;", "min": "min.f32 $0, $1, 0f3F000000;",
        "ex2": "ex2.approx.ftz.f32 $0, $1;", "tanh": "tanh.approx.f32 $0, $1;",
        "tanh_f16x2": "tanh.approx.f16x2 $0, $1;", "tanh_bf16x2": "tanh.approx.bf16x2 $0, $1;",
        "fma_bf16x2": "fma.rn.bf16x2 $0, $1, $1, $1;", "cvt_bf16x2": "cvt.rn.bf16x2.f32 $0, $1, $1;",
    }
    x = torch.rand(2048, device="cuda")
    times = {}
    for name, asm in kinds.items():
        constraints = "=r,f" if name == "cvt_bf16x2" else "=r,r" if name.endswith("x2") else "=f,f"
        for repeats in (1, 3):  # compile, then time
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                spin[(132 * 4,)](x, asm, constraints, 2000, num_warps=4)
            end.record()
            torch.cuda.synchronize()
        times[name] = begin.elapsed_time(end) / 3
    for name, ms in times.items():
        emit(out, {"pipe": name, "ms": ms, "instructions_a_clock": 128 * times["fma"] / ms})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["check", "stress", "time", "pipes", "warm"])
    parser.add_argument("variant", nargs="?")
    parser.add_argument("--out", required=True)
    parser.add_argument("--plan", default="forward")
    parser.add_argument("--of", default="")
    parser.add_argument("--cases", nargs="*", default=[])
    options = parser.parse_args()
    start = time.time()
    code = 0
    if options.work == "check":
        code = check(options.variant, options.out)
    elif options.work == "stress":
        code = stress(options.variant, options.out, options.cases)
    elif options.work == "warm":
        warm(options.of.split(","))
    elif options.work == "pipes":
        pipes(options.out)
    else:
        times(options.plan, options.of.split(","), options.out, options.cases)
    print(f"{options.work} {options.variant or options.plan}: {time.time() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
