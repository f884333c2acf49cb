"""Host time of a call, forward and backward, on inputs too small to fill a GPU: microseconds, medians of bursts.

    python -m benchmarks.ladder.host_time --out FILE.jsonl

`direct`: as the package launches. `bound`: as before, through what Triton does for a compiled kernel at each call.
`floor`: an op of the package's kind with the allocations of a flash-attention forward and one empty kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time

import torch
import triton
from torch import Tensor

from benchmarks.kernels.jfa import make_inputs
from opengem import kernels
from opengem.kernels import launch as launches
from opengem.kernels.custom_op import define

_bound: dict[tuple, tuple] = {}


def bound_launch(kernel, grid, key, arguments, constants, warps=4, stages=3, registers=None):
    """`launch` before it went past Triton's launcher."""
    place = id(kernel), key, constants, warps, stages, registers
    if place in _bound:
        _bound[place][0][grid](*arguments, *constants)
        return
    limit = {} if registers is None else {"maxnreg": registers}
    compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages, **limit)
    if key is not None:
        _bound[place] = compiled, kernel


def use(function) -> None:
    """Let every module of the package launch by `function`."""
    for name, module in list(sys.modules.items()):
        theirs = getattr(module, "launch", None) if name.startswith("opengem.") and module is not launches else None
        if theirs in (launches.launch, bound_launch):
            module.launch = function


@triton.jit
def _empty(x_ptr):
    pass


def _run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    records = torch.empty(100, dtype=torch.int32, device=q.device)
    floor_launch(_empty, (1, 1, 1), (q.device, q.dtype), (records,), ())
    return out, lse


floor_launch = launches.launch
floor = define(
    "host_time_floor", _run, lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output), lambda ctx, *grads: (None, None, None))


def calls() -> dict:
    """name -> (call, leaves)."""
    q, k, v, offsets = make_inputs([64] * 8, 64, torch.device("cuda"), 0)
    wide = make_inputs([64] * 8, 128, torch.device("cuda"), 0)
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    long_offsets = offsets.long()
    return {
        "floor": (lambda: floor(q, k, v)[0], None),
        "jfa": (lambda: kernels.jagged_flash_attention(q, k, v, offsets, max_q=64), (q, k, v)),
        "gdpa": (lambda: kernels.gdpa(*wide[:3], offsets, max_q=64), wide[:3]),
        "block": (lambda: kernels.block_attention(*wide[:3], long_offsets, max_length=64), wide[:3]),
        "norm": (lambda: kernels.rms_norm(x, weight), (x, weight)),
    }


def microseconds(call) -> float:
    """Of one call in a burst of 20 with an idle GPU before it."""
    times = []
    for turn in range(60):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        if turn >= 10:
            times.append((time.perf_counter() - start) / 20 * 1e6)
    return round(statistics.median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    def emit(**row):
        with open(options.out, "a") as file:
            print(json.dumps(row), file=file, flush=True)
        print(json.dumps(row), flush=True)

    everything = calls()
    emit(empty_launch=microseconds(functools.partial(_empty_launch, torch.empty(1, device="cuda"))),
         allocation=microseconds(lambda: torch.empty(100, dtype=torch.int32, device="cuda")))
    for name, (call, leaves) in everything.items():
        call()
        if leaves:  # modules are imported and kernels compiled
            torch.autograd.grad(call().float().sum(), leaves)
        for kind, function in (("bound", bound_launch), ("direct", launches.launch)) * 2:
            use(function)
            globals()["floor_launch"] = function
            row = {"op": name, "launch": kind, "fwd": microseconds(call)}
            with torch.no_grad():
                row["fwd_no_grad"] = microseconds(call)
            if leaves:
                out = call()
                grad = torch.ones_like(out)
                row["bwd"] = microseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))  # noqa: B023
            emit(**row)


def _empty_launch(x: Tensor) -> None:
    launches.launch(_empty, (1, 1, 1), (x.device, x.dtype), (x,), ())


if __name__ == "__main__":
    main()
