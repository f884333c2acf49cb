"""Compile the GDPA kernels for an NVIDIA architecture without a GPU, with every tile size of `launch.py`.

    python -m tests.kernels.gdpa.aot CAPABILITY [NAME ...]  # one JSON line a kernel

A program of its own, so that a compiler abort ends only this process and another Triton can be tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opengem.kernels.gdpa import launch
from opengem.kernels.gdpa import triton as kernels

INTEGERS = {"batch", "q_rows", "kv_rows", "q_bound", "kv_bound", "H"}
POINTERS = {"partial": "*fp32", "q_offsets": "*i64", "kv_offsets": "*i64", "schedule": "*i32"}


def wide(dim: int, act: str = "gelu_tanh", seeds: int = 0) -> dict:
    """name -> (kernel, constants, options) of the wide family."""
    found = {}
    padded = 128 if dim == 96 else dim
    tables = ((kernels.wide_fwd, launch.FWD), (kernels.wide_dq, launch.DQ), (kernels.wide_dkdv, launch.DKDV))
    for kernel, table in tables:
        bm, bn, warps, stages = table[padded]
        constants = {"ACT": act, "FAST": True, "BM": bm, "BN": bn, "D": dim, "DP": padded, "SEEDS": seeds}
        found[f"{kernel.__name__}_{dim}_{act}"] = (kernel, constants, {"num_warps": warps, "num_stages": stages})
    return found


def narrow(dim: int, act: str = "gelu_tanh", seeds: int = 32, block_q: int = 32, runs: bool = False) -> dict:
    found = {}
    padded = 128 if dim == 96 else dim
    for kernel, table in ((kernels.narrow_fwd, launch.NARROW_FWD), (kernels.narrow_bwd, launch.NARROW_BWD)):
        bn, warps, stages = table[padded]
        constants = {"ACT": act, "FAST": True, "BM": block_q, "BN": bn, "D": dim, "DP": padded, "SEEDS": seeds,
                     "CHUNK": launch.CHUNK, "RUNS": runs}
        found[f"{kernel.__name__}_{dim}_{act}"] = (kernel, constants, {"num_warps": warps, "num_stages": stages})
    return found


def schedule() -> dict:
    constants = {"Q_TILE": 128, "KV_TILE": 128, "SEEDS": 0, "NARROW": False, "OWN": 32}
    return {"deal_tiles": (kernels.deal_tiles, constants, {})}


def signature(kernel, constants: dict, dtype: str) -> dict:
    kinds = {}
    for name in kernel.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name in INTEGERS or name.endswith(("_row", "_head")):
            kinds[name] = "i32"
        elif name == "scale":
            kinds[name] = "fp32"
        else:
            kinds[name] = POINTERS.get(name, dtype)
    return kinds


def compile_one(kernel, constants: dict, options: dict, capability: int, dtype: str = "*bf16") -> dict:
    """Pointers and strides count as divisible by 16, as a launch would find them."""
    kinds = signature(kernel, constants, dtype)
    aligned = [n for n, kind in kinds.items() if kind.startswith("*") or n.endswith(("_row", "_head"))]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    compiled = triton.compile(
        ASTSource(kernel, kinds, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    return describe(compiled, capability)


def describe(compiled, capability: int) -> dict:
    ptx = compiled.asm["ptx"]
    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{capability}a", path, "-o", os.path.join(folder, "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "serialised": "C7512" in log or "C7510" in log,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "mma_sync": len(re.findall(r"\bmma\.sync", ptx)),
        "cp_async": ptx.count("cp.async.cg"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "setmaxnreg": ptx.count("setmaxnreg"),
        "triton": triton.__version__,
    }


def gluon() -> dict:
    """name -> (kernel, constants, rows of each descriptor's box by the first letter of its name)."""
    from opengem.kernels.gdpa import gluon_sm90

    found = {}
    for dim in launch.GLUON_HEAD_DIMS:
        common = {"ACT": "gelu_tanh", "D": dim}
        stages = {"BN": launch.GLUON_KEYS, "STAGES": launch.GLUON_STAGES, "Q_STAGES": launch.GLUON_STAGES}
        rows = {"q": 64, "o": 64, "k": launch.GLUON_KEYS, "v": launch.GLUON_KEYS}
        for resident in (False, True):
            name = f"gluon_fwd_{dim}_{'resident' if resident else 'stream'}"
            found[name] = (gluon_sm90.forward, common | stages | {"RESIDENT": resident}, rows)
        for side, (tile, depth), keys in (("dq", launch.GLUON_DQ, False), ("dkdv", launch.GLUON_DKDV, True)):
            constants = common | {"BN": tile, "STAGES": depth, "KEYS": keys}
            found[f"gluon_{side}_{dim}"] = (gluon_sm90.backward, constants, {"a": 64, "o": 64, "b": tile})
    return found


def compile_gluon(kernel, constants: dict, rows: dict) -> dict:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def descriptor(count: int) -> str:
        box = [1, 1, count, constants["D"]]
        return f"tensordesc<bf16{str(box).replace(' ', '')},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"

    kinds = {}
    for name in kernel.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name.endswith("_desc"):
            kinds[name] = descriptor(rows[name[0]])
        elif name in ("out", "o1", "o2"):
            kinds[name] = "*bf16"
        else:
            others = {"offsets": "*i64", "schedule": "*i32", "scale": "fp32", "out_elements": "i64"}
            kinds[name] = others.get(name, "i32")
    aligned = [n for n, kind in kinds.items() if kind.startswith("*") or n.endswith("_head")]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    compiled = triton.compile(
        GluonASTSource(kernel, kinds, constants, attributes), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    return describe(compiled, 90)


def every_kernel() -> dict:
    found = schedule()
    for dim in launch.HEAD_DIMS:
        found |= wide(dim) | narrow(dim)
    return found


def main() -> None:
    capability, names = int(sys.argv[1]), sys.argv[2:]

    def wanted(name: str) -> bool:
        return not names or any(n in name for n in names)

    for name, (kernel, constants, options) in every_kernel().items():
        if wanted(name):
            print(json.dumps({"kernel": name} | compile_one(kernel, constants, options, capability)), flush=True)
    for name, (kernel, constants, rows) in (gluon() if capability == 90 else {}).items():
        if wanted(name):
            print(json.dumps({"kernel": name} | compile_gluon(kernel, constants, rows)), flush=True)


if __name__ == "__main__":
    main()
