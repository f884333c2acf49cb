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

INTEGERS = {"batch", "q_rows", "kv_rows", "q_bound", "H"}
POINTERS = {"partial": "*fp32", "q_offsets": "*i64", "kv_offsets": "*i64", "schedule": "*i32"}


def wide(dim: int, act: str = "gelu_tanh", seeds: int = 0) -> dict:
    """name -> (kernel, constants, options) of the wide family."""
    found = {}
    padded = launch._padded(dim)
    tables = ((kernels.wide_fwd, launch.FWD), (kernels.wide_dq, launch.DQ), (kernels.wide_dkdv, launch.DKDV))
    for kernel, table in tables:
        bm, bn, warps, stages = table[padded]
        constants = {"ACT": act, "FAST": True, "BM": bm, "BN": bn, "D": dim, "DP": padded, "SEEDS": seeds}
        found[f"{kernel.__name__}_{dim}_{act}"] = (kernel, constants, {"num_warps": warps, "num_stages": stages})
    return found


def narrow(dim: int, act: str = "gelu_tanh", seeds: int = 32, block_q: int = 32, runs: bool = False) -> dict:
    found = {}
    padded = launch._padded(dim)
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
        "triton": triton.__version__,
    }


def every_kernel() -> dict:
    found = schedule()
    for dim in launch.HEAD_DIMS:
        found |= wide(dim) | narrow(dim)
    return found


def main() -> None:
    capability, names = int(sys.argv[1]), sys.argv[2:]
    for name, (kernel, constants, options) in every_kernel().items():
        if not names or any(n in name for n in names):
            print(json.dumps({"kernel": name} | compile_one(kernel, constants, options, capability)), flush=True)


if __name__ == "__main__":
    main()
