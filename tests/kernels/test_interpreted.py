"""Runs the kernel tests of the memory-bound ops in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch

OPS = ("adamw", "block", "chain", "mx", "norm", "pool", "rope", "swiglu", "jagged_ops")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on this machine")
def test_kernels_in_the_interpreter():
    files = [f"tests/kernels/{op}/test_triton.py" for op in OPS]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not ahead_of_time", *files]
    child = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-1000:]
