"""Check the sparse kernels on this GPU against plain torch, then time them (`sparse_variants.py` sweeps their options).

    python benchmarks/ladder/sparse_check.py --out DIR [--sections check profile bench] [--case NAME]

Each section writes DIR/SECTION.CASE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels import sparse as bench
from opengem.kernels import backend


def check(say, case: str) -> None:
    """A small copy of the mix: kernels against plain torch on the same device."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        groups = bench.make(dtype, 0.01, torch.device("cuda"), batches=1)
        for group in groups if dtype == torch.float32 else groups[1::3]:
            begin = group.weight.clone()
            results = []
            for name in ("reference", "triton"):
                group.weight.copy_(begin)
                group.state["moment"].zero_()
                with backend.force(name):
                    out = group.lookup(0)
                    group.update(bench.sort([group], 0)[0], 0, 1)
                results.append((out, group.weight.clone(), group.state["moment"].clone()))
            group.weight.copy_(begin)
            group.state["moment"].zero_()
            group.update(bench.sort([group], 0)[0], 0, 1)
            again = torch.equal(group.weight, results[1][1])
            errors = [
                float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-9))
                for a, b in zip(results[1], results[0], strict=True)
            ]
            limit = 1e-4 if dtype == torch.float32 else 1e-2
            say({"dtype": str(dtype), "kind": group.kind, "dim": group.weight.shape[1], "errors": errors,
                 "same_bits": again, "ok": again and max(errors) < limit})  # fmt: skip


def profile(say, case: str) -> None:
    """Milliseconds of each kernel in a step of the case."""
    groups = bench.make(*bench.CASES[case], torch.device("cuda"), batches=2)

    def step(i: int) -> None:
        for group in groups:
            group.lookup(i % 2)
        for group, order in zip(groups, bench.sort(groups, i % 2), strict=True):
            group.update(order, i % 2, i + 1)

    for i in range(3):
        step(i)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(4):
            step(i)
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
    say({"host_ms_a_step": host / 4 * 1e3})
    totals = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:25]
    for event in totals:
        say({"kernel": event.key[:90], "ms_a_step": event.self_device_time_total / 4e3, "calls": event.count / 4})


def timing(say, case: str) -> None:
    for row in bench.run(None, True, (case,)):
        say(row)


SECTIONS = {"check": check, "profile": profile, "bench": timing}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS))
    parser.add_argument("--case", default="gem_fp32_rows.5")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.sections:
        begin = time.perf_counter()
        with open(arguments.out / f"{name}.{arguments.case}.jsonl", "w") as file:

            def say(row: dict, file=file) -> None:
                file.write(json.dumps(row) + "\n")
                file.flush()

            SECTIONS[name](say, arguments.case)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
