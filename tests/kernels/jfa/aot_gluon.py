"""Compiles a Gluon kernel ahead of time for sm_90 without a GPU and reports what came out, as JSON.

    python -m tests.kernels.jfa.aot_gluon forward|dq|dkdv HEAD_DIM [full|causal|window] [bf16|fp16]
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from opengem.kernels.jfa import gluon_sm90, gluon_sm90_backward
from tests.kernels.jfa.aot import usage


def source(kernel: str, head_dim: int, mask: str, dtype: str) -> GluonASTSource:
    element = gl.bfloat16 if dtype == "bf16" else gl.float16

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], element)
        return f"tensordesc<{dtype}[{rows},{head_dim}],{layout!r}>"

    before, after = mask == "window", mask != "full"
    if kernel == "forward":
        made, keys, stages = gluon_sm90._forward_kernel, gluon_sm90.KEYS, gluon_sm90.STAGES[head_dim]
        constants = {"GROUP": 1, "HAS_LEFT": before, "HAS_RIGHT": after, "HEAD_DIM": head_dim, "KEYS": keys,
                     "STAGES": stages, "Q_STAGES": 1}
        rows = {"q_desc": 64, "k_desc": keys, "v_desc": keys}
    else:
        made, stream = gluon_sm90_backward._backward_kernel, gluon_sm90_backward.STREAM
        own = kernel == "dkdv"
        before, after = (after, before) if own else (before, after)
        constants = {"GROUP": 1, "KEYS_OWN": own, "HAS_BEFORE": before, "HAS_AFTER": after, "HEAD_DIM": head_dim,
                     "STREAM": stream, "STAGES": gluon_sm90_backward.STAGES[head_dim]}
        rows = {"stay0_desc": 64, "stay1_desc": 64, "pass0_desc": stream, "pass1_desc": stream}
    floats = {"lse_ptr", "delta_ptr"}
    signature = {}
    for name in made.arg_names:
        if name in rows:
            signature[name] = descriptor(rows[name])
        elif name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name == "records_ptr" else "*fp32" if name in floats else f"*{dtype}"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(made.arg_names) if name.endswith("_ptr")}
    return GluonASTSource(made, signature, constants, aligned)


def report(kernel: str, head_dim: int, mask: str = "full", dtype: str = "bf16") -> dict:
    made = source(kernel, head_dim, mask, dtype)
    compiled = triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    registers, spilled = usage(ptx, 90)
    return {"kernel": kernel, "head_dim": head_dim, "mask": mask, "dtype": dtype, "shared": compiled.metadata.shared,
            "registers": registers, "spilled": spilled, "wgmma": ptx.count("wgmma.mma_async"),
            "mma.sync": ptx.count("mma.sync"), "tma": ptx.count("cp.async.bulk.tensor"),
            "setmaxnreg": sorted(set(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
