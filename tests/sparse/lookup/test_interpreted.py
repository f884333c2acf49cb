"""Runs the kernel tests of test_op.py in Triton's interpreter, in its own process (the switch is read on import)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton", str(Path(__file__).with_name("test_op.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout[-4000:]
    assert "passed" in child.stdout and "failed" not in child.stdout
