"""Runs the kernel tests of test_op.py in Triton's interpreter, in its own process (the switch is read on import)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def run(command: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton", str(Path(__file__).with_name("test_op.py"))]
    child = run(command)
    assert child.returncode == 0, child.stdout[-4000:]
    assert "passed" in child.stdout and "failed" not in child.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made unreadable with mprotect")
def test_no_kernel_reads_or_writes_outside_its_tensors():
    pytest.importorskip("triton")
    child = run([sys.executable, "-X", "faulthandler", "-m", "tests.sparse.lookup.guarded"])
    assert child.returncode == 0, child.stdout[-500:] + child.stderr[-4000:]
    assert child.stdout.endswith("done\n")
