"""Time launch options and variants of the sparse kernels, kernel by kernel and width by width, in one process.

    python benchmarks/ladder/sparse_variants.py --out FILE --case gem_fp32_rows.5      (GPU)
    python benchmarks/ladder/sparse_variants.py --warm I N                             (compiles part I of N)
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
from opengem.sparse.lookup import triton as kernels

SCALARS = (0.01, 1e-8, 1.0, 0.9, 0.999, 1.0, 1.0)
FORWARD = [{"tile": tile} for tile in [(256, 1), (512, 1), (512, 2), (1024, 1), (2048, 2)]]
# (CUT, SHORT, elements of a short tile, of a long one, short pieces a visit, programs an SM)
UPDATE = [
    (128, 2, 256, 512, 16, 256),
    (128, 2, 512, 512, 16, 256),
    (128, 2, 128, 512, 16, 256),
    (128, 2, 256, 256, 16, 256),
    (128, 2, 256, 512, 8, 256),
    (128, 2, 256, 512, 16, 64),
    (128, 4, 256, 512, 16, 256),
    (64, 2, 256, 512, 16, 256),
]


def update(group, order, batch: int, step: int, options: tuple) -> None:
    _, _, short, long, visit, programs = options
    kernels.update(
        group.weight, group.state["moment"], None, group.grads[: group.outputs(batch)], order.keys, order.source,
        order.coefficients, *order.pieces, order.span, group.rounding.at_step(step), "adagrad", SCALARS, short=short,
        long=long, visit=visit, programs_per_sm=programs,
    )  # fmt: skip


def lookup(group, batch: int, options: dict) -> None:
    ids, offsets, weights = group.batches[batch]
    kernels.lookup(group.weight, ids, offsets, group.first_rows, group.pooling, weights, group.weight.dtype, **options)


def profiled(step, names, groups, repeats: int = 3) -> dict:
    """kernel/kind/dim -> milliseconds of the named kernels, launched once a group in the order of `groups`."""
    step(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(repeats):
            step(i + 1)
        torch.cuda.synchronize()
    found = {}
    for name in names:
        events = [e for e in profiler.events() if e.name == name]
        events.sort(key=lambda e: e.time_range.start)
        for i, event in enumerate(events):
            group = groups[i % len(groups)]
            key = f"{name.removesuffix('_kernel')} {group.kind} {group.weight.shape[1]}"
            found[key] = found.get(key, 0.0) + event.time_range.elapsed_us() / 1e3 / repeats
        found[name] = sum(e.time_range.elapsed_us() for e in events) / 1e3 / repeats
    return {key: round(value, 4) for key, value in found.items()}


def forward_variants(say, groups) -> None:
    rows = [g for g in groups if g.kind == "none"]
    pooled = [g for g in groups if g.kind != "none"]
    for options in FORWARD:
        for part, name in ((rows, "lookup_rows_kernel"), (pooled, "lookup_pooled_kernel")):
            step = lambda i, part=part, options=options: [lookup(g, i % 2, options) for g in part]  # noqa: E731
            say({"forward": options, **profiled(step, [name], part)})


def update_variants(say, groups) -> None:
    for options in UPDATE:
        kernels.CUT, kernels.SHORT = options[:2]
        orders = [bench.sort(groups, i) for i in range(2)]

        def step(i: int, orders=orders, options=options) -> None:
            for group, order in zip(groups, orders[i % 2], strict=True):
                update(group, order, i % 2, i + 1, options)

        ms = bench.timed(step, 8)[0]
        say({"update": options, "ms": ms})
    kernels.CUT, kernels.SHORT = UPDATE[0][:2]


def sort_variants(say, groups) -> None:
    say({"sort": "one for all", "ms": bench.timed(lambda i: bench.sort(groups, i % 2), 8)[0]})
    say({"sort": "one for each", "ms": bench.timed(lambda i: [bench.sort([g], i % 2) for g in groups], 8)[0]})
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(4):
            bench.sort(groups, i % 2)
        torch.cuda.synchronize()
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:14]:
        say({"sort kernel": event.key[:70], "ms": event.self_device_time_total / 4e3, "calls": event.count / 4})


def warm(part: int, parts: int) -> None:
    """Compile every variant on a tiny mix."""
    number = 0
    for dtype in (torch.float32, torch.float16):
        groups = bench.make(dtype, 0.001, torch.device("cuda"), batches=1)
        chosen = [g for g in groups if g.kind in ("weighted", "none")]
        for options in UPDATE:
            kernels.CUT, kernels.SHORT = options[:2]
            for group in chosen:
                number += 1
                if number % parts == part:
                    update(group, bench.sort([group], 0)[0], 0, 1, options)
        kernels.CUT, kernels.SHORT = UPDATE[0][:2]
        for options in FORWARD:
            for group in groups[2:]:  # sum, weighted, none of some width
                number += 1
                if number % parts == part:
                    lookup(group, 0, options)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs="+", default=["gem_fp32_rows.5"])
    parser.add_argument("--warm", type=int, nargs=2)
    parser.add_argument("--first", type=int, default=len(UPDATE), help="only so many variants of the update")
    parser.add_argument("--parts", nargs="+", default=["sort", "update", "forward"])
    arguments = parser.parse_args()
    del UPDATE[arguments.first :]
    if arguments.warm:
        return warm(*arguments.warm)
    begin = time.perf_counter()
    for case in arguments.case:
        groups = bench.make(*bench.CASES[case], torch.device("cuda"), batches=2)

        def say(row: dict, case=case) -> None:
            with open(arguments.out, "a") as file:
                file.write(json.dumps({"case": case, "at": round(time.perf_counter() - begin, 1), **row}) + "\n")

        say({"made": True, "fwd_bwd_bytes": bench.least_bytes(groups)})
        for name in arguments.parts:
            {"sort": sort_variants, "update": update_variants, "forward": forward_variants}[name](say, groups)
        del groups
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
