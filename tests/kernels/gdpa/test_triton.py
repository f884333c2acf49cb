"""The Triton kernels without a GPU: run by the interpreter in fp32, and compiled for sm_90 and sm_100."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def _python(*arguments: str, timeout: int = 280) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment,
                          timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_interpreted_kernels_match_the_naive_loop():
    """Every length pattern, activation and head dimension, forward and backward, buffers poisoned."""
    _python("tests.kernels.gdpa.interpret")


@pytest.mark.parametrize(("capability", "unit"), [(90, "wgmma"), (100, "tcgen05")])
def test_compiles_for_the_matrix_unit_without_spills(capability, unit):
    rows = [json.loads(line) for line in _python("tests.kernels.gdpa.aot", str(capability), "_64_gelu").splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert row[unit] > 0 and row["spill_bytes"] == 0 and row["shared"] <= 227 * 1024, row


def test_hopper_kernels_are_specialised_fed_by_tma_and_do_not_serialise():
    names = ("gluon_fwd_128_resident", "gluon_dq_128", "gluon_dkdv_128")
    rows = [json.loads(line) for line in _python("tests.kernels.gdpa.aot", "90", *names).splitlines()]
    assert [row["kernel"] for row in rows] == list(names)
    for row in rows:
        assert row["wgmma"] > 0 and row["tma"] > 0 and row["setmaxnreg"] > 0 and row["warps"] == 12, row
        assert not row["mma_sync"] and not row["serialised"] and row["shared"] <= 227 * 1024, row
        assert row["spill_bytes"] <= (256 if "dkdv" in row["kernel"] else 0), row
