"""`opengem bench kernels`: time our ops and their peers in one process, with the ceilings of this very GPU beside them.

A time is the median of single runs timed by device events, the L2 cache overwritten before each, after half a second of
warm-up; the spread is the distance between the quartiles over the median. Inputs are random normal. A row whose result
does not agree with ours (where both compute the same function) is reported as an error, not as a speed.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.registry import Case, cases
from opengem.data.files import writable
from opengem.errors import UserError

MIN_RUNS, MAX_RUNS, TARGET_S, WARMUP_S = 5, 100, 0.4, 0.5


def kernels(op: str, out: Path | None, peers: bool, only: tuple[str, ...] = (), seed: int = 0) -> list[dict]:
    """Time every case of `op` (or those named in `only`); append JSON lines to `out`; return the rows."""
    if not torch.cuda.is_available():
        raise UserError("bench kernels needs a CUDA device and this machine has none")
    device = torch.device("cuda")
    chosen = [case for case in cases(op) if not only or case.name in only]
    if not chosen:
        raise UserError(f"bench: op {op!r} has no case {only}; known: {', '.join(case.name for case in cases(op))}")
    facts = environment(device) | ceilings(device)
    print(f"{facts['gpu']}: matmul {facts['matmul_tflops']:.0f} TFLOPS, copy {facts['copy_gbs']:.0f} GB/s")
    rows = []
    for case in chosen:
        if case.counted:
            print(f"{case.name}: {case.counted}")
        for row in run_case(case, device, peers, seed):
            rows.append(row | facts)
            record(rows[-1], describe(rows[-1]), out)
        torch.cuda.empty_cache()
    return rows


def record(row: dict, line: str, out: Path | None) -> None:
    """Print `line` and append the row to `out` as JSON."""
    print(line, flush=True)
    if out is not None:
        with writable(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with open(out, "a") as file:
                file.write(json.dumps(row) + "\n")


def run_case(case: Case, device: torch.device, peers: bool, seed: int = 0) -> list[dict]:
    """One row for our op and one for each peer that is installed; a failed peer is a row with `error`."""
    inputs = case.make(device, seed)
    truth = case.ours(*inputs).detach()
    rows = []
    for name, function in {"opengem": case.ours, **(case.peers if peers else {})}.items():
        row = {"op": case.op, "case": case.name, "impl": name, "peer": None if name == "opengem" else name}
        row["shape"] = case.shape
        try:
            compare = case.same_function and name not in case.unlike
            rows.append(row | _measure(case, function, inputs, truth if compare else None))
        except ImportError as error:
            rows.append(row | {"error": f"not installed: {error}"})
        except (RuntimeError, ValueError, TypeError, torch.OutOfMemoryError) as error:
            rows.append(row | {"error": " ".join(str(error).split())[:200]})
    return rows


def _measure(case: Case, function: Callable[..., Tensor], inputs: tuple, truth: Tensor | None) -> dict:
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    result = function(*inputs)
    error = None if truth is None else _relative_error(result.detach(), truth)
    if error is not None and not error <= case.tolerance:
        raise RuntimeError(f"result differs from ours by {error:.2e} (relative)")
    with torch.no_grad():
        fwd_ms, fwd_spread = timed(lambda: function(*inputs))
    row = {"fwd_ms": fwd_ms, "bwd_ms": None, "bwd_spread": None, "spread": fwd_spread, "rel_err": error}
    row |= _rates("fwd", fwd_ms, case.fwd_flops, case.fwd_bytes) | _rates("bwd", None, 0, 0)
    if leaves and case.bwd_bytes + case.bwd_flops:
        grad = torch.randn_like(result)
        backward = lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)  # noqa: E731
        row["bwd_ms"], row["bwd_spread"] = timed(backward)
        row |= _rates("bwd", row["bwd_ms"], case.bwd_flops, case.bwd_bytes)
    return row


def _relative_error(x: Tensor, truth: Tensor) -> float:
    return float((x.float() - truth.float()).norm() / truth.float().norm().clamp_min(1e-30))


def _rates(part: str, ms: float | None, flops: int, moved: int) -> dict:
    seconds = ms / 1e3 if ms else None
    tflops = flops / seconds / 1e12 if seconds and flops else None
    return {f"{part}_tflops": tflops, f"{part}_gbs": moved / seconds / 1e9 if seconds and moved else None}


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """(median milliseconds, quartile distance over median) of single calls, the L2 overwritten before each."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    while time.perf_counter() - start < WARMUP_S:
        function()
        torch.cuda.synchronize()
    count = max(MIN_RUNS, min(MAX_RUNS, int(TARGET_S / max(once, 1e-4))))
    begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    for first, last in zip(begin, end, strict=True):
        flush.random_(0, 255)
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) for first, last in zip(begin, end, strict=True)]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / middle


def ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU reaches now: an 8192^3 bf16 matrix product and a 2 GiB copy (bytes read plus written)."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms, _ = timed(lambda: a @ b)
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    copy_ms, _ = timed(lambda: target.copy_(source))
    return {
        "matmul_tflops": 2 * 8192**3 / product_ms / 1e9,
        "copy_gbs": 2 * source.nbytes / copy_ms / 1e6,
    }


def environment(device: torch.device) -> dict[str, str | None]:
    """What a number was measured with."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }


def describe(row: dict) -> str:
    """One printed line."""
    head = f"{row['case']:<34}{row['impl']:<28}"
    if "error" in row:
        return f"{head}{row['error']}"
    parts = []
    for part in ("fwd", "bwd"):
        if row[f"{part}_ms"] is None:
            continue
        text = f"{part} {row[f'{part}_ms']:8.3f} ms"
        if row[f"{part}_tflops"]:
            text += (
                f" {row[f'{part}_tflops']:5.0f} TFLOPS ({row[f'{part}_tflops'] / row['matmul_tflops']:.2f} of matmul)"
            )
        if row[f"{part}_gbs"]:
            text += f" {row[f'{part}_gbs']:5.0f} GB/s ({row[f'{part}_gbs'] / row['copy_gbs']:.2f} of copy)"
        parts.append(text)
    return head + "  ".join(parts)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
