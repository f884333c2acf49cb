"""The Triton kernels without a GPU: run by the interpreter in fp32."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_interpreted_kernels_match_the_naive_loop():
    """Every length pattern, activation and head dimension, forward and backward, buffers poisoned."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", "tests.kernels.gdpa.interpret"], capture_output=True, text=True,
                          timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
