"""`opengem bench kernels --op jfa --peers` with FlexAttention in every case, in the time of a coffee.

    python -m benchmarks.ladder.jfa_peers --out FILE.jsonl [--wait 90]

FlexAttention compiles for half a minute a case, so that each case has a process, and all compile side by side. When the
last is ready (or `--wait` seconds are over) they measure one after the other, alone on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import run
from benchmarks.kernels import jfa

run.WARMUP_S, run.TARGET_S = 0.25, 0.25


def with_peers(case: run.Case, *peers) -> run.Case:
    """The case with these peers."""
    shape = case.shape
    mask = jfa.Mask(shape["causal"], shape["window"] and tuple(shape["window"]))
    return dataclasses.replace(
        case, peers={peer.__name__: functools.partial(peer, shape["max"], mask) for peer in peers})


def split(case: run.Case) -> tuple[run.Case, run.Case | None]:
    """The case with peers that are timed both ways, and with cuDNN, whose backward takes .8 s: its forward alone.

    FlexAttention's block mask of the window case, 11,000 by 11,000 blocks, does not fit the GPU beside the rest.
    """
    if case.shape["window"]:
        return with_peers(case, jfa.torch_varlen_fa2), None
    both = with_peers(case, jfa.torch_varlen_fa2, jfa.flex_attention)
    return both, dataclasses.replace(with_peers(case, jfa.sdpa_cudnn_padded), bwd_flops=0, bwd_bytes=0)


def measure(name: str, folder: Path, count: int, out: Path, wait: float) -> None:
    """Call every implementation of the case once, both ways; wait for the others; measure."""
    begin, device = time.time(), torch.device("cuda")
    case, forward = split(next(case for case in jfa.cases() if case.name == name))
    inputs = case.make(device, 0)
    for peer, function in {"opengem": case.ours, **case.peers}.items():
        try:
            result = function(*inputs)
            torch.autograd.grad(result, inputs[:3], torch.ones_like(result))
        except Exception as problem:  # noqa: BLE001  (`run_case` tells of it)
            print(f"{name} {peer}: {str(problem)[:200]}", flush=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    (folder / name).touch()
    print(f"{name} ready after {time.time() - begin:.0f} s", flush=True)
    while len(list(folder.iterdir())) < count and time.time() - begin < wait:
        time.sleep(0.05)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        facts = run.environment(device) | run.ceilings(device)
        rows = run.run_case(dataclasses.replace(case, make=lambda *_: inputs), device, peers=True)
        if forward:
            rows += run.run_case(dataclasses.replace(forward, make=lambda *_: inputs), device, peers=True)[1:]
        for row in rows:
            run.record(row | facts, run.describe(row | facts), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wait", type=float, default=90)
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "FOLDER", "COUNT"), help="for this command itself")
    given = parser.parse_args()
    if given.worker:
        name, folder, count = given.worker
        measure(name, Path(folder), int(count), given.out, given.wait)
        return
    names, folder = [case.name for case in jfa.cases()], tempfile.mkdtemp()
    command = [sys.executable, "-m", "benchmarks.ladder.jfa_peers", "--out", given.out, "--wait", str(given.wait)]
    workers = [subprocess.Popen([*command, "--worker", name, folder, str(len(names))]) for name in names]
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
