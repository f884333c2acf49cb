"""Runs test_triton.py in the Triton interpreter, which has to be chosen before any kernel is imported: in a child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real kernels are tested instead")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", str(Path(__file__).with_name("test_triton.py"))]
    child = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0 and " passed" in child.stdout, child.stdout[-3000:]
