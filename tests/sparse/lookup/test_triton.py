"""The kernels compile for Hopper and Blackwell without spills, with wide loads; nothing is run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import opengem

aot = pytest.importorskip("tests.kernels.aot")
MODULE = "opengem.sparse.lookup.triton"
SCALARS = ["lr", "eps", "moment_scale", "beta1", "beta2", "correction1", "correction2"]


def types_of(row: str, grad: str) -> dict[str, str]:
    types = {"weight": row, "grads": grad, "out": grad, "ids": "*i64", "offsets": "*i64", "first_rows": "*i64"}
    types |= {"moment": "*fp32", "first_moment": "*fp32", "partials": "*fp32", "sample_weights": "*fp32"}
    types |= {"coefficients": "*fp32", "keys": "*i32", "source": "*i32", "starts": "*i32", "numbers": "*i32"}
    types |= dict.fromkeys(["run_starts", "run_shifts", "order"], "*i64")
    types |= {"origins": "*i32", "marks": "*i32"} | dict.fromkeys(SCALARS, "fp32")
    numbers = ["count", "first", "last", "base", "num_runs", "key", "bags_per_feature", "blocks", "every"]
    return types | dict.fromkeys(numbers, "i32")


def compiled(kernel: str, dim: int, row: str, **constants) -> dict:
    width = 1 << (dim - 1).bit_length()
    known = {"DIM": dim, "BLOCK_D": width, **constants}
    num_warps = known.pop("num_warps", 2)
    return aot.compile_ahead(
        f"{MODULE}:{kernel}", types_of(row, row), known, capability=known.pop("capability", 90), num_warps=num_warps
    )


@pytest.mark.parametrize("row, capability", [("*fp32", 90), ("*fp16", 100)])
def test_update_compiles_without_spills(row, capability):
    common = {"CUT": 128, "SHORT": 2, "WEIGHTED": True, "OPTIMISER": "adagrad", "ROUND": row != "*fp32", "SEARCH": 8}
    common |= {"PIECES": 2, "VISIT": 16, "POSITIONS": 4}
    found = compiled("update_kernel", 128, row, capability=capability, num_warps=1, **common)
    assert found["spill_bytes"] == 0 and found["shared"] <= aot.SHARED_LIMIT
    assert "atom.global" not in found["ptx"]
    assert "ld.global.v4" in found["ptx"]  # a row is read 16 bytes a lane


def test_other_kernels_compile():
    for row in ("*fp32", "*fp16"):
        found = compiled("lookup_pooled_kernel", 128, row, ROWS=16, MEAN=False, WEIGHTED=True)
        assert found["spill_bytes"] == 0 and "ld.global.v4" in found["ptx"]
    found = compiled("lookup_rows_kernel", 64, "*fp16", ROWS=32)
    assert found["spill_bytes"] == 0 and "st.global.v4" in found["ptx"]
    found = compiled("combine_kernel", 256, "*bf16", AHEAD=16, CUT=128, OPTIMISER="adam", ROUND=True, SEARCH=0)
    assert found["spill_bytes"] == 0


def test_no_kernel_guards_a_load_with_and():
    """Triton evaluates both sides of `and` and `or`: a load there needs a mask, or it reads what the guard forbids."""
    root, seen = Path(opengem.__file__).parent, 0
    for path in [*root.rglob("triton.py"), *root.rglob("gluon*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                seen += 1
                operations = [n for n in ast.walk(node) if isinstance(n, ast.BoolOp)]
                assert not [ast.unparse(n) for n in operations if "load(" in ast.unparse(n)], f"{path.name} {node.name}"
    assert seen > 40
