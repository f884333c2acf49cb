"""What the compiler makes of the kernels, without a GPU: the right instruction, shared memory that fits, no spills."""

from __future__ import annotations

import pytest

from tests.kernels.aot import assert_on_tensor_cores, compile_all, job

pytest.importorskip("triton")
TYPES = {"*offsets_ptr": "*i64", "records_ptr": "*i32", "scale*": "fp32"}
TYPES |= dict.fromkeys(["*lse_ptr", "delta_ptr", "sums_ptr", "*bias_ptr"], "*fp32") | {"*_ptr": "*bf16", "*": "i32"}


def portable(kernel: str, dim: int, *, capability: int = 90, pair: bool = False, causal: bool = False) -> dict:
    """job of a Triton kernel."""
    from opengem.kernels.jfa import triton

    tile = triton.config(kernel, dim, pair)
    own, stream = ("BLOCK_N", "BLOCK_M") if kernel == "dkdv" else ("BLOCK_M", "BLOCK_N")
    constants = {"GROUP": 1, "HAS_LEFT": False, "HAS_RIGHT": causal, "HEAD_DIM": dim, "BIAS": int(pair),
                 "BLOCK_D": dim, own: tile.own, stream: tile.stream}
    if not pair:
        constants |= dict.fromkeys(["bias_ptr", "pair_offsets_ptr"])
    return job(f"opengem.kernels.jfa.triton:_{kernel}_kernel", TYPES, constants, capability=capability,
               aligned=("*_stride", "*_head"), num_warps=tile.warps, num_stages=tile.stages)


def hopper(kernel: str, dim: int, *, causal: bool = False, keys_own: bool = False) -> dict:
    """job of a Gluon kernel."""
    from opengem.kernels.jfa import gluon_sm90 as forward
    from opengem.kernels.jfa import gluon_sm90_backward as backward

    module = forward if kernel == "forward" else backward
    constants = {"GROUP": 1, "HEAD_DIM": dim, "STAGES": module.STAGES[dim], "Q_STAGES": 1, "KEYS": forward.KEYS,
                 "STREAM": backward.STREAM, "KEYS_OWN": keys_own}
    constants |= dict.fromkeys(["HAS_LEFT", "HAS_BEFORE"], False) | dict.fromkeys(["HAS_RIGHT", "HAS_AFTER"], causal)
    rows = {"q_desc": 64, "stay?_desc": 64, "[kv]_desc": forward.KEYS, "pass?_desc": backward.STREAM}
    types = {name: f"bf16[{count},{dim}]" for name, count in rows.items()} | TYPES
    name = "forward" if kernel == "forward" else "backward"
    return job(f"{module.__name__}:_{name}_kernel", types, constants, num_warps=4)


CASES = {  # name -> (function and arguments that make the job, bytes of spills allowed)
    "triton forward": (portable, ["forward", 128], {"causal": True}, 0),
    "triton dk, dv": (portable, ["dkdv", 128], {}, 64),
    "triton forward with a pair bias": (portable, ["forward", 64], {"pair": True}, 64),
    "triton forward on Blackwell": (portable, ["forward", 128], {"capability": 100}, 0),
    "gluon forward": (hopper, ["forward", 128], {}, 0),
    "gluon dq": (hopper, ["backward", 128], {"causal": True}, 0),
    "gluon dk, dv": (hopper, ["backward", 64], {"causal": True, "keys_own": True}, 0),
}


@pytest.fixture(scope="module")
def found():
    jobs = [make(*arguments, **options) for make, arguments, options, _ in CASES.values()]
    return dict(zip(CASES, compile_all(jobs), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_the_gpu(case, found):
    assert_on_tensor_cores(found[case], CASES[case][-1])
