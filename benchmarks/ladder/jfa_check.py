"""Checks and times every version of jagged flash attention on one GPU, each in a process of its own with a time limit.

    python -m benchmarks.ladder.jfa_check --out FILE.jsonl [--limit 90] [--only NAME ...]

A kernel that hangs or crashes costs its own lines, not the run. Lines: {"check": ...} correctness against the fp64
reference, {"time": ...} median milliseconds and useful TFLOPS (backward counted as 2.5 forwards), with the L2 flushed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.kernels.jfa import HEADS, Mask, lognormal_lengths, make_inputs, torch_varlen_fa2, uniform_lengths
from opengem.kernels import backend
from opengem.kernels.jfa import cost, reference
from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.kernels.jfa.reference import Options

EDGES = [
    ([0, 0, 0], None), ([1], None), ([3, 0, 5, 0, 0, 2], None), ([63, 64, 65], None), ([127, 128, 129], None),
    ([255, 256, 257], None), ([1, 700, 0, 2, 1, 3], None), ([17, 111, 4, 64, 200, 1] * 9, None), ([1] * 3000, None),
    ([0, 2, 1, 0], [3, 2, 1, 4]), ([2, 2, 0, 1], [0, 2, 0, 0]), ([130, 7, 64], [5, 1, 16]),
    ([4, 4, 4, 4], [300, 0, 1, 65]), ([500, 1000, 333], [700, 900, 1200]),
]
MASKS = {"full": Mask(), "causal": Mask(causal=True), "window": Mask(window=(70, 30)), "left": Mask(window=(200, -1)),
         "causal_window": Mask(causal=True, window=(128, -1))}


# ---- correctness -----------------------------------------------------------------------------------------------


def check(implementation: str, dim: int, backward: bool, blocks: int = 0) -> None:
    """All edge lengths and masks in bf16, one mask in fp16; `blocks` limits a persistent grid so that items queue."""
    if blocks:
        from opengem.kernels.jfa import gluon_sm90, gluon_sm90_backward

        gluon_sm90.multiprocessors = gluon_sm90_backward.multiprocessors = lambda device: blocks
    for dtype in (torch.bfloat16, torch.float16):
        for name, mask in MASKS.items():
            worst = {}
            for q_lengths, kv_lengths in EDGES:
                errors = _errors(implementation, dim, dtype, mask, q_lengths, kv_lengths or q_lengths, backward)
                worst = {key: max(worst.get(key, 0.0), value) for key, value in errors.items()}
            good = all(value < 2e-2 for value in worst.values())
            emit(check=implementation, dim=dim, dtype=str(dtype), mask=name, blocks=blocks, ok=good, **worst)
            if dtype == torch.float16:
                break


def _errors(implementation, dim, dtype, mask, q_lengths, kv_lengths, backward) -> dict:
    """Largest error relative to the largest value, of each result; infinite where not finite or not repeatable."""
    torch.manual_seed(0)
    rows = sum(q_lengths) + 3, sum(kv_lengths) + 3
    shapes = (rows[0], HEADS, dim), (rows[1], HEADS // 2, dim), (rows[1], HEADS // 2, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes)
    with torch.no_grad():  # rows behind the offsets must not be read
        for x in (q, k, v):
            x[-3:] = float("nan")
    offsets = [torch.tensor([0, *n]).cumsum(0).cuda() for n in (q_lengths, kv_lengths)]
    most = max(q_lengths), max(kv_lengths)
    dout = torch.randn_like(q)
    results = []
    for _ in range(2):
        with backend.force(implementation):
            out, lse = jagged_flash_attention(
                q, k, v, *offsets, max_q=most[0], max_kv=most[1], causal=mask.causal, window=mask.window,
                return_lse=True)
            results.append([out, lse, *(torch.autograd.grad(out, (q, k, v), dout) if backward else ())])
    left, right = cost.normalise_window(mask.causal, mask.window)
    options = Options(dim**-0.5, left, right)
    exact = [x.detach()[:-3].double() for x in (q, k, v)]
    want = list(reference.forward(*exact, *offsets, None, *most, options))
    if backward:
        want += reference.backward(dout[:-3].double(), None, *exact, *want, *offsets, None, *most, options)[:3]
    errors = {}
    for name, got, again, right in zip(("out", "lse", "dq", "dk", "dv"), *results, want, strict=False):
        rows = got.transpose(0, 1) if name == "lse" else got
        right = (right.transpose(0, 1) if name == "lse" else right).double()
        got_rows, tail = rows[:-3].double(), rows[-3:]
        same = torch.equal(got.nan_to_num(1e9), again.nan_to_num(1e9))
        unused = bool(tail.isneginf().all() if name == "lse" else (tail == 0).all())
        hidden = right.isneginf()
        if not (same and unused and torch.equal(got_rows.isneginf(), hidden)):
            errors[name] = float("inf")
            emit(problem=name, repeatable=same, unused_rows_zero=unused, q_lengths=q_lengths, kv_lengths=kv_lengths)
            continue
        gap = (got_rows - right).masked_fill(hidden, 0).abs()
        scale = right.masked_fill(hidden, 0).abs()
        errors[name] = float(gap.max() / scale.max().clamp(min=1.0)) if gap.numel() else 0.0
        errors[name] = errors[name] if errors[name] == errors[name] else float("inf")
    return errors


# ---- time ------------------------------------------------------------------------------------------------------


CASES = {
    "lognormal2048_d128_full": (lognormal_lengths, 2048, 128, Mask()),
    "lognormal2048_d128_causal": (lognormal_lengths, 2048, 128, Mask(causal=True)),
    "uniform1024_d128_full": (lambda: uniform_lengths(256, 1, 1024), 1024, 128, Mask()),
    "uniform1024_d128_causal": (lambda: uniform_lengths(256, 1, 1024), 1024, 128, Mask(causal=True)),
    "lognormal2048_d64_full": (lognormal_lengths, 2048, 64, Mask()),
    "lognormal2048_d64_causal": (lognormal_lengths, 2048, 64, Mask(causal=True)),
    "swa128_4096": (lambda: uniform_lengths(1152, 0, 2457), 4096, 128, Mask(window=(128, 128))),
}


def timed(version: str, backward: bool = False) -> None:
    """Forward or backward on every case; the ladder's forward kernels know full attention only."""
    for name, (make_lengths, most, dim, mask) in CASES.items():
        lengths = make_lengths()
        q, k, v, offsets = make_inputs(lengths, dim, torch.device("cuda"), 0)
        flops = cost.flops(lengths, lengths, HEADS, dim, causal=mask.causal, window=mask.window)
        # The calls below are timed before the loop moves on, so they see their own case.
        if version in ("mask_all", "subtract", "mask_tail"):
            if mask != Mask():
                continue
            from benchmarks.ladder.jfa_forward import forward

            with torch.no_grad():
                ms, low, high = median_ms(lambda: forward(q, k, v, offsets, version))  # noqa: B023
            emit(time=version, case=name, fwd_ms=ms, fwd_tflops=flops / ms / 1e9, spread=[low, high])
            continue
        if version in ("atomic", "owner"):
            if mask == Mask():
                emit(time=version, case=name, **_ladder_backward(version, q, k, v, offsets, most, flops))
            continue
        if version == "torch_varlen_fa2":
            def run():
                return torch_varlen_fa2(most, mask, q, k, v, offsets)  # noqa: B023
        else:
            def run():
                with backend.force(version):
                    return jagged_flash_attention(
                        q, k, v, offsets, max_q=most, causal=mask.causal, window=mask.window)  # noqa: B023
        if not backward:
            ms, low, high = median_ms(run)
            emit(time=version, case=name, fwd_ms=ms, fwd_tflops=flops / ms / 1e9, spread=[low, high])
            continue
        out = run()
        dout = torch.randn_like(out)
        with backend.force("triton" if version == "torch_varlen_fa2" else version):
            ms, low, high = median_ms(
                lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))  # noqa: B023
        emit(time=version, case=name, bwd_ms=ms, bwd_tflops=2.5 * flops / ms / 1e9, spread=[low, high])


def _ladder_backward(version: str, q, k, v, offsets, most: int, flops: int) -> dict:
    """Time of a ladder backward, and its largest difference to the package's, relative to the largest gradient."""
    from benchmarks.ladder.jfa_backward import backward

    with backend.force("triton"):
        out, lse = jagged_flash_attention(q, k, v, offsets, max_q=most, return_lse=True)
        dout = torch.randn_like(out)
        want = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        got = backward(dout, q, k, v, out, lse, offsets, version)
        ms, low, high = median_ms(lambda: backward(dout, q, k, v, out, lse, offsets, version))
    gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    return {"bwd_ms": ms, "bwd_tflops": 2.5 * flops / ms / 1e9, "spread": [low, high], "gap": gap}


def machine() -> None:
    """The 8192^3 bf16 matmul and a 1 GiB copy of this very run."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = median_ms(lambda: a @ b)[0]
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    copy = median_ms(lambda: y.copy_(x))[0]
    emit(time="machine", gpu=torch.cuda.get_device_name(), matmul_tflops=2 * 8192**3 / ms / 1e9,
         copy_gbs=2 * x.nbytes / copy / 1e6)


def host_time(version: str) -> None:
    """Microseconds of host time for a forward and for a backward call, on inputs too small to fill the GPU."""
    q, k, v, offsets = make_inputs([64] * 8, 64, torch.device("cuda"), 0)
    with backend.force(version):
        out = jagged_flash_attention(q, k, v, offsets, max_q=64)
        dout = torch.ones_like(out)
        calls = {"fwd": lambda: jagged_flash_attention(q, k, v, offsets, max_q=64),
                 "bwd": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}
        for name, call in calls.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            emit(host=version, call=name, us=(time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()


def median_ms(run, repeats: int = 15) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) with the L2 overwritten before each call."""
    flush = torch.empty(1 << 26, device="cuda")  # 256 MiB
    for _ in range(3):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in marks]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


# ---- the run ---------------------------------------------------------------------------------------------------

WORK = {
    "machine": machine,
    "check_triton_128": lambda: check("triton", 128, True),
    "check_gluon_128": lambda: check("gluon", 128, False),
    "check_gluon_64": lambda: check("gluon", 64, False),
    "check_gluon_128_queued": lambda: check("gluon", 128, False, blocks=7),
    "check_gluon_backward_128": lambda: check("gluon", 128, True),
    "check_gluon_backward_64": lambda: check("gluon", 64, True),
    "check_gluon_backward_128_queued": lambda: check("gluon", 128, True, blocks=7),
    "time_triton": lambda: timed("triton"),
    "time_gluon": lambda: timed("gluon"),
    "time_fa2": lambda: timed("torch_varlen_fa2"),
    "time_triton_backward": lambda: timed("triton", backward=True),
    "time_gluon_backward": lambda: timed("gluon", backward=True),
    "time_fa2_backward": lambda: timed("torch_varlen_fa2", backward=True),
    "time_mask_all": lambda: timed("mask_all"),
    "time_subtract": lambda: timed("subtract"),
    "time_mask_tail": lambda: timed("mask_tail"),
    "time_atomic": lambda: timed("atomic"),
    "time_owner": lambda: timed("owner"),
    "host": lambda: [host_time(version) for version in ("triton", "gluon")],
    "check_triton_64": lambda: check("triton", 64, True),
    "check_triton_256": lambda: check("triton", 256, True),
    "check_triton_96": lambda: check("triton", 96, True),
    "check_triton_32": lambda: check("triton", 32, True),
}


def emit(**line) -> None:
    print(json.dumps({key: round(x, 5) if isinstance(x, float) else x for key, x in line.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit", type=float, default=90, help="seconds each piece of work may take")
    parser.add_argument("--only", nargs="*", default=list(WORK), help="names of pieces of work")
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        WORK[options.worker]()
        return
    with open(options.out, "a") as file:
        for name in options.only:
            command = [sys.executable, "-m", "benchmarks.ladder.jfa_check", "--out", options.out, "--worker", name]
            start = time.time()
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                out, err = child.communicate(timeout=options.limit)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                err += "\ntimed out"
            status = {"work": name, "seconds": round(time.time() - start, 1), "rc": child.returncode}
            if child.returncode:
                status["error"] = err[-1500:]
            text = out + json.dumps(status) + "\n"
            print(text, end="", flush=True)
            file.write(text)
            file.flush()


if __name__ == "__main__":
    main()
