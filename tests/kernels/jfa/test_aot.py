"""What the compiler makes of the kernels, without a GPU: the right instruction, shared memory that fits, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED = 227 * 1024
CASES = {
    "triton forward": ("aot", ["forward", "128", "90", "none", "causal"], "wgmma.mma_async", 0),
    "triton dk, dv": ("aot", ["dkdv", "128", "90", "none", "full"], "wgmma.mma_async", 64),
    "triton forward with a pair bias": ("aot", ["forward", "64", "90", "pair", "full"], "wgmma.mma_async", 64),
    "triton forward on Blackwell": ("aot", ["forward", "128", "100", "none", "full"], "tcgen05.mma", 0),
    "gluon forward": ("aot_gluon", ["forward", "128", "full"], "wgmma", 0),
    "gluon dq": ("aot_gluon", ["dq", "128", "causal"], "wgmma", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_the_gpu(case, tmp_path):
    """In a process of its own: a failed assertion in the compiler ends the process."""
    module, arguments, instruction, spills = CASES[case]
    child = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.jfa.{module}", *arguments], capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert child.returncode == 0, child.stderr[-2000:]
    report = json.loads(child.stdout)
    assert report[instruction] > 0 and report["mma.sync"] == 0, report
    assert report["shared"] <= SHARED and report["spilled"] <= spills, report
