"""GDPA on one GPU, step by step: is each variant right on the edge grid, and how fast is it?

    python benchmarks/ladder/gdpa_check.py --out FILE.jsonl [--variants triton,gluon] [--timeout 100] [--cases WORDS]

Every variant runs in a process of its own with a time limit, so that a hang or a fault costs that variant only. Lines:
{"variant", "check": name, "ok", "error"} and {"variant", "case", fwd_ms, bwd_ms, ...}. Exit status 1 if a check failed.
`--fast` only times, with a tenth of the warm-up and a quarter of the runs.
Variants: `triton`; `gluon` (Hopper); `gluon_fwd` (its forward with Triton's backward); `tune`, which times other tile
sizes of the Triton kernels at head dimension 128.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
EDGES = ("triton", "gluon_fwd", "gluon")
ACTIVATION_CASES = ("_gelu", "_gelu_poly", "_silu")


def emit(out: str, row: dict) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")


# ---- correctness -------------------------------------------------------------------------------------------------


def check_case(name: str, q_lengths, kv_lengths, dim: int, seeds: int = 0, activation: str = "gelu_tanh",
               tail: int = 0) -> tuple[bool, str]:
    """Against the fp64 loop: relative error of out, dq, dk, dv; equal bits in a second run; rows of nobody zero."""
    import torch

    from opengem.kernels.gdpa import gdpa
    from tests.kernels import grid
    from tests.kernels.gdpa import naive

    q_lengths = [seeds] * len(kv_lengths) if seeds else q_lengths
    rows, keys = seeds or sum(q_lengths), sum(kv_lengths)
    q, _, _ = grid.fused_views(rows + (0 if seeds else tail), 2, dim, "cuda", torch.bfloat16, 1)
    _, k, v = grid.fused_views(keys + tail, 2, dim, "cuda", torch.bfloat16, 2)
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"activation": activation, "scale": 0.2, "shared_q": bool(seeds)}
    sizes = {"max_q": seeds or max(q_lengths, default=0), "max_kv": max(kv_lengths, default=0)}
    offsets = None if seeds else grid.offsets(q_lengths, "cuda"), grid.offsets(kv_lengths, "cuda")
    owned = [qkv[0] if seeds else qkv[0][:rows], qkv[1][:keys], qkv[2][:keys]]
    truth = naive.gdpa(*owned, q_lengths, kv_lengths, **options)
    runs = []
    for _ in range(2):
        out = gdpa(*qkv, *offsets, **sizes, **options)
        grad = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).to(out.dtype)
        runs.append([out.detach(), *naive.gradients(out, qkv, grad)])
    wanted = [truth.detach(), *naive.gradients(truth, qkv, grad[: truth.shape[0]])]
    problems = []
    for label, got, again, want in zip(("out", "dq", "dk", "dv"), *runs, wanted, strict=True):
        if not torch.equal(got, again):
            problems.append(f"{label} differs between runs")
        size = float(want.double().norm())
        error = float((got[: want.shape[0]].double() - want.double()).norm())
        if not error <= 8e-3 * size + 1e-6:
            problems.append(f"{label} off by {error / max(size, 1e-30):.1e}")
        if got.shape[0] > want.shape[0] and bool(got[want.shape[0] :].ne(0).any()):
            problems.append(f"{label} has rows of nobody that are not 0")
    return not problems, "; ".join(problems)


def first_checks() -> list[tuple]:
    """Head dimension 128 and one activation: few kernels to compile."""
    from tests.kernels import grid

    found = [(f"{name} D=128", *grid.case(name), 128) for name in grid.LENGTHS]
    found += [(f"{name} seeds", [], grid.case(name)[1], 128, 32) for name in ("unsorted", "zero_kv", "empty_batch")]
    many = [(37 * i) % 301 for i in range(300)]
    found.append(("many items a block", many, many[::-1], 128))
    found.append(("many items, long keys", many, [n * 5 for n in many[::-1]], 128))
    found.append(("many short keys", [n * 3 for n in many], [n % 257 for n in many], 128))
    found.append(("rows of nobody", [130, 0, 70], [5, 100, 300], 128, 0, "gelu_tanh", 500))
    found.append(("rows of nobody, narrow", [13, 0, 7], [5, 100, 300], 128, 0, "gelu_tanh", 500))
    return found


def more_checks() -> list[tuple]:
    from tests.kernels import grid

    found = [(f"{name} D=64", *grid.case(name), 64) for name in grid.LENGTHS]
    found.append(("70 seeds", [], [5, 300, 0, 129], 64, 70))
    acts = ("gelu", "gelu_poly", "silu", "identity", "relu2")
    return found + [(f"{name} D=128", [3, 66, 200], [300, 70, 129], 128, 0, name) for name in acts]


def check_all(variant: str, out: str, checks: list[tuple]) -> bool:
    good = True
    for name, *arguments in checks:
        try:
            ok, error = check_case(name, *arguments)
        except Exception as problem:  # noqa: BLE001  one broken case must not hide the others
            ok, error = False, f"{type(problem).__name__}: {str(problem)[:300]}"
        good &= ok
        emit(out, {"variant": variant, "check": name, "ok": ok, "error": error})
        if not ok:
            print(f"{variant}: {name}: {error}", flush=True)
    return good


# ---- time --------------------------------------------------------------------------------------------------------


def time_all(variant: str, out: str, words: list[str], facts: dict, activations: bool) -> None:
    import torch

    from benchmarks.kernels.gdpa import cases
    from benchmarks.run import describe, run_case

    for case in cases():
        if case.name.endswith(ACTIVATION_CASES) != activations or words and not any(w in case.name for w in words):
            continue
        for row in run_case(case, torch.device("cuda"), False):
            print(f"{variant:<8}" + describe(row | facts), flush=True)
            emit(out, row | facts | {"impl": variant, "variant": variant})
        torch.cuda.empty_cache()


def host_time(variant: str, out: str) -> None:
    """Microseconds the host is busy with one call on tiny inputs."""
    import torch

    from opengem.kernels.gdpa import gdpa
    from tests.kernels import grid

    q, k, v = (x.requires_grad_() for x in grid.fused_views(256, 4, 128, "cuda", torch.bfloat16))
    offsets = grid.offsets([128, 128], "cuda")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for repeats in (50, 500):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(repeats):
                    gdpa(q, k, v, offsets, max_q=128, activation="gelu_tanh")
                spent = (time.perf_counter() - start) / repeats * 1e6
        print(f"{variant}: host {spent:.0f} us a forward call, requires_grad={grad}", flush=True)
        emit(out, {"variant": variant, "host_us": spent, "requires_grad": grad})


def tune(out: str, words: list[str]) -> None:
    """Forward (dq, dkdv) of the Triton kernels with other tile sizes; equal results are checked against the first."""
    import torch

    from benchmarks.kernels.gdpa import cases
    from benchmarks.run import timed
    from opengem.kernels.gdpa import launch

    grids = {
        "FWD": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 4)],
        "DKDV": [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3), (32, 128, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2)],
        "DQ": [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 64, 8, 3), (128, 32, 4, 2)],
        "NARROW_FWD": [(64, 4, 3), (64, 4, 2), (128, 4, 2), (128, 8, 2), (64, 8, 3), (64, 4, 4)],
        "NARROW_BWD": [(64, 4, 2), (64, 4, 3), (32, 4, 3), (64, 8, 2), (128, 8, 2)],
    }
    wanted = words or ["gdpa_self1024_fill.5", "gdpa_cross1024x256_fill.5", "pma32x2048_fill.5"]
    for case in [c for c in cases() if c.name in wanted]:
        inputs = case.make(torch.device("cuda"), 0)
        leaves = [x for x in inputs if x.requires_grad]
        grad = torch.randn_like(case.ours(*inputs))
        for table, choices in grids.items():
            if table.startswith("NARROW") != case.name.startswith("pma"):
                continue
            entry = getattr(launch, table)
            first = entry[128]
            truth = None
            for choice in choices:
                entry[128] = choice
                try:
                    out_tensor = case.ours(*inputs)
                    result = (out_tensor,) if "FWD" in table else torch.autograd.grad(out_tensor, leaves, grad)
                    truth = truth or [x.detach().float() for x in result]
                    error = max(float((x.float() - t).norm() / t.norm()) for x, t in zip(result, truth, strict=True))
                    out_tensor = case.ours(*inputs)
                    run = (lambda: case.ours(*inputs)) if "FWD" in table else (  # noqa: B023
                        lambda: torch.autograd.grad(out_tensor, leaves, grad, retain_graph=True))  # noqa: B023
                    ms, _ = timed(run)
                    row = {"variant": "tune", "case": case.name, "table": table, "choice": choice, "ms": ms,
                           "differs": error}
                except Exception as problem:  # noqa: BLE001
                    row = {"variant": "tune", "case": case.name, "table": table, "choice": choice,
                           "error": str(problem)[:200]}
                print(row, flush=True)
                emit(out, row)
            entry[128] = first
        torch.cuda.empty_cache()


# ---- processes ---------------------------------------------------------------------------------------------------


def child(variant: str, out: str, words: list[str], fast: bool) -> int:
    import torch

    from benchmarks import run
    from benchmarks.run import ceilings, environment
    from opengem.kernels import backend

    if variant == "tune":
        tune(out, words)
        return 0
    if variant == "gluon_fwd":
        from opengem.kernels.gdpa import launch

        both = launch.backward
        launch.backward = lambda *a, gluon, **b: both(*a, gluon=False, **b)
    device = torch.device("cuda")
    if fast:
        run.WARMUP_S, run.TARGET_S = run.WARMUP_S / 10, run.TARGET_S / 4
        with backend.force(variant):
            host_time(variant, out)
            time_all(variant, out, words, environment(device) | ceilings(device), activations=False)
        return 0
    with backend.force(variant.split("_")[0]):
        good = check_all(variant, out, first_checks())
        print(f"{variant}: first checks {'passed' if good else 'FAILED'}", flush=True)
        facts = environment(device) | ceilings(device)
        time_all(variant, out, words, facts, activations=False)
        host_time(variant, out)
        good &= check_all(variant, out, more_checks())
        print(f"{variant}: all checks {'passed' if good else 'FAILED'}", flush=True)
        time_all(variant, out, words, facts, activations=True)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--variants", default=",".join(EDGES))
    parser.add_argument("--timeout", type=float, default=100)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.out, options.cases, options.fast)
    os.makedirs(os.path.dirname(os.path.abspath(options.out)), exist_ok=True)
    failed = 0
    for variant in options.variants.split(","):
        command = [sys.executable, __file__, "--out", options.out, "--child", variant, "--cases", *options.cases]
        command += ["--fast"] if options.fast else []
        try:
            code = subprocess.run(command, timeout=options.timeout).returncode
        except subprocess.TimeoutExpired:
            code = 124
        print(f"== {variant}: exit {code}", flush=True)
        emit(options.out, {"variant": variant, "exit": code})
        failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
