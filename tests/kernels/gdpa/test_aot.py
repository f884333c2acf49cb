"""What the compiler makes of the kernels with the tile sizes of `launch.py`, without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.aot import assert_barriers_apart, assert_on_tensor_cores, compile_all, job

pytest.importorskip("triton")
TYPES = {"partial": "*fp32", "scratch": "*fp32", "counters": "*i32", "*offsets": "*i64", "schedule": "*i32",
         "scale": "fp32", "*_elements": "i64"}
TYPES |= dict.fromkeys(["batch", "*_start", "*_rows", "*_bound", "*_row", "*_head", "*_slots", "limit", "H"], "i32")
TYPES |= {"*": "*bf16"}
STRIDES = ("*_row", "*_head")


def portable(dim: int, capability: int) -> list[dict]:
    """jobs of the Triton kernels that multiply: any number of queries, then at most 64."""
    from opengem.kernels.gdpa import launch

    jobs, common = [], {"ACT": "gelu_tanh", "FAST": True, "D": dim, "DP": dim, "CHUNK": launch.CHUNK, "RUNS": False}
    for name in ("wide_fwd", "wide_dq", "wide_dkdv", "narrow_fwd", "narrow_bwd"):
        narrow = name.startswith("narrow")
        table = getattr(launch, (name if narrow else name.removeprefix("wide_")).upper())
        *rows, keys, warps, stages = table[dim]
        constants = common | {"BM": rows[0] if rows else 32, "BN": keys, "SEEDS": 32 if narrow else 0}
        jobs.append(job(f"opengem.kernels.gdpa.triton:{name}", TYPES, constants, capability=capability,
                        aligned=STRIDES, num_warps=warps, num_stages=stages))
    return jobs


def hopper(dim: int) -> list[dict]:
    """jobs of the Gluon kernels: forward, the backward in two kernels (dq; dk and dv), and at 128 the one in one."""
    from opengem.kernels.gdpa import launch
    from opengem.kernels.jfa.gluon_sm90 import plain_layout

    jobs = []
    tables = (False, launch.STREAM), (True, launch.RESIDENT), (True, launch.RESIDENT_SHORT)
    for resident, (tile, depth, turns) in tables:
        constants = {"BN": tile, "STAGES": depth, "RESIDENT": resident, "TURNS": turns, "FOLD": True}
        boxes = {"[kv]_desc": f"bf16[1,1,{tile},{dim}]", "*_desc": f"bf16[1,1,64,{dim}]"}
        jobs.append(("gluon_sm90:forward", boxes, constants))
    for keys, (tile, depth) in ((False, launch.GLUON_DQ), (True, launch.GLUON_DKDV)):
        boxes = {"[ao]*_desc": f"bf16[1,1,64,{dim}]", "*_desc": f"bf16[1,1,{tile},{dim}]"}
        jobs.append(("gluon_sm90:backward", boxes, {"BN": tile, "STAGES": depth, "KEYS": keys}))
    if dim == 128:
        boxes = {"sums_desc": f"tensordesc<fp32[64,{dim}],{plain_layout()!r}>",
                 "*_desc": f"bf16[1,1,64,{dim}]"}
        stages = dict(zip(("Q_STAGES", "G_STAGES"), launch.BACKWARD_STAGES, strict=True)) | {"FOLD": True}
        jobs += [("gluon_sm90_backward:backward", boxes,
                  stages | {"OWNER": owner, "V_STAGES": 1 + owner, "MIXED": owner}) for owner in (False, True)]
    return [job(f"opengem.kernels.gdpa.{name}", boxes | TYPES, constants | {"ACT": "gelu_tanh", "D": dim},
                aligned=STRIDES, num_warps=4) for name, boxes, constants in jobs]


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_for_the_matrix_unit_without_spills(capability):
    for found in compile_all(portable(64, capability)):
        assert_on_tensor_cores(found)


def test_hopper_kernels_are_specialised_fed_by_tma_and_do_not_serialise():
    for found, spill_bytes in zip(compile_all(hopper(128)), (0, 0, 0, 0, 256, 320, 128), strict=True):
        assert_on_tensor_cores(found, spill_bytes)
        assert_barriers_apart(found)
        assert "cp.async.bulk.tensor" in found["ptx"] and "setmaxnreg" in found["ptx"], found["ptx"]
        assert found["warps"] == 12 and not found["serialised"], found["warps"]
