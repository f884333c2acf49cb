"""Compiles the Gluon forward ahead of time for sm_90 without a GPU and reports what came out, as JSON.

    python -m tests.kernels.jfa.aot_gluon HEAD_DIM [full|causal|window] [bf16|fp16]
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from opengem.kernels.jfa import gluon_sm90 as kernels
from tests.kernels.jfa.aot import usage


def source(head_dim: int, mask: str, dtype: str) -> GluonASTSource:
    element = gl.bfloat16 if dtype == "bf16" else gl.float16

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], element)
        return f"tensordesc<{dtype}[{rows},{head_dim}],{layout!r}>"

    constants = {"GROUP": 1, "HAS_LEFT": mask == "window", "HAS_RIGHT": mask != "full", "HEAD_DIM": head_dim,
                 "KEYS": kernels.KEYS, "STAGES": kernels.STAGES[head_dim], "Q_STAGES": 1}
    signature = {
        "q_desc": descriptor(64), "k_desc": descriptor(kernels.KEYS), "v_desc": descriptor(kernels.KEYS),
        "out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "records_ptr": "*i32", "slots": "i32", "items": "i32",
        "total_q": "i32", "scale2": "fp32", "left": "i32", "right": "i32"} | dict.fromkeys(constants, "constexpr")
    names = list(signature)
    aligned = {(names.index(x),): [["tt.divisibility", 16]] for x in ("out_ptr", "lse_ptr", "records_ptr")}
    return GluonASTSource(kernels._forward_kernel, signature, constants, aligned)


def report(head_dim: int, mask: str = "full", dtype: str = "bf16") -> dict:
    compiled = triton.compile(source(head_dim, mask, dtype), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    registers, spilled = usage(ptx, 90)
    return {"head_dim": head_dim, "mask": mask, "dtype": dtype, "shared": compiled.metadata.shared,
            "registers": registers, "spilled": spilled, "wgmma": ptx.count("wgmma.mma_async"),
            "mma.sync": ptx.count("mma.sync"), "tma": ptx.count("cp.async.bulk.tensor"),
            "setmaxnreg": sorted(set(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))}


if __name__ == "__main__":
    print(json.dumps(report(int(sys.argv[1]), *sys.argv[2:])))
