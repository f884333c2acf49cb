"""The kernels of a training step compile for Hopper without a GPU: next to no spills, wide loads and stores."""

from __future__ import annotations

import pytest

from tests.kernels.aot import compile_all, job

pytest.importorskip("triton")
NUMBERS = dict.fromkeys(["rows", "first", "width", "samples", "seeds", "size", "*_stride"], "i32")
STEP = {"table": "*i64", "owners": "*i32", "starts": "*i64", "parameter": "*fp32", "grad": "*bf16", "copy": "*bf16"}
STEP |= dict.fromkeys(["decays", "corrections", "norm", "skip"], "*fp32") | {"*": "fp32"}
POOL = dict.fromkeys(["dseed", "dscale", "dshift"], "*fp32") | NUMBERS | {"*": "*bf16"}
SEEDS = {"EPS": 1e-5, "ROWS": 16, "BLOCK": 512}
CASES = {
    "adamw.triton:_adamw": (STEP, {"COPIES": True, "COLUMNS": 6, "CHUNK": 2048}, (), 8),
    "pool.triton:_join": (POOL, {"BLOCK": 512, "ROWS": 8}, ("first", "width"), 4),
    "pool.triton:_split": (POOL, {"BLOCK": 128, "ROWS": 32}, ("first", "width"), 4),
    "pool.triton:_modulate": (POOL, SEEDS, ("seeds", "width", "*_stride"), 8),
    "pool.triton:_modulate_backward": (POOL, SEEDS, ("seeds", "width", "*_stride"), 8),
    "chain.triton:_forward": (POOL, SEEDS | {"ROWS": 4}, ("width",), 4),
    "chain.triton:_backward": (POOL, SEEDS | {"ROWS": 4, "HAS_TOTAL": True}, ("width",), 4),
}


@pytest.fixture(scope="module")
def found():
    jobs = [job(f"opengem.kernels.{name}", types, constants, aligned=aligned, num_warps=warps)
            for name, (types, constants, aligned, warps) in CASES.items()]
    return dict(zip(CASES, compile_all(jobs), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_the_gpu(name, found):
    assert found[name]["spill_bytes"] <= 16 and "global.v4" in found[name]["ptx"]
