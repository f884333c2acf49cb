"""Compiles one kernel of the op ahead of time for sm_90 or sm_100 without a GPU and reports what came out, as JSON.

    python -m tests.kernels.jfa.aot KERNEL HEAD_DIM CAPABILITY [none|pair|relative] [full|causal|window] [bf16|fp16]
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

from opengem.kernels.jfa import triton as kernels

KERNELS = {
    "forward": kernels._forward_kernel, "dq": kernels._dq_kernel, "dkdv": kernels._dkdv_kernel,
    "diagonals": kernels._diagonals_kernel,
}
FLOATS = {"lse_ptr", "dlse_ptr", "delta_ptr", "sums_ptr", "bias_ptr", "dbias_ptr"}


def source(name: str, head_dim: int, bias: str, mask: str, dtype: str) -> tuple[ASTSource, kernels.Config]:
    kernel, tile = KERNELS[name], kernels.config(name, head_dim, bias != "none")
    constants = {
        "GROUP": 1, "HAS_LEFT": mask == "window", "HAS_RIGHT": mask != "full", "HEAD_DIM": head_dim,
        "BIAS": {"none": 0, "pair": 1, "relative": 2}[bias], "BLOCK_D": triton.next_power_of_2(head_dim),
        "HAS_DLSE": False, "dlse_ptr": None, "BLOCK": tile.own,
    }
    own, stream = ("BLOCK_N", "BLOCK_M") if name == "dkdv" else ("BLOCK_M", "BLOCK_N")
    constants |= {own: tile.own, stream: tile.stream}
    if bias == "none":
        constants |= {"bias_ptr": None}
    if bias != "pair":
        constants |= {"dbias_ptr": None, "pair_offsets_ptr": None}
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    signature = {}
    for arg in kernel.arg_names:
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg.endswith("offsets_ptr"):
            signature[arg] = "*i64"
        elif arg.endswith("_ptr"):
            signature[arg] = "*fp32" if arg in FLOATS else f"*{dtype}"
        else:
            signature[arg] = "fp32" if arg.startswith("scale") else "i32"
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*") or arg.endswith(("_stride", "_head"))
    }
    return ASTSource(kernel, signature, constants, aligned), tile


def usage(ptx: str, capability: int) -> tuple[int, int]:
    """(registers per thread, bytes spilled), as `ptxas -v` reports them."""
    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{capability}a", path, "-o", os.path.join(folder, "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", log)]
    return max(registers), sum(int(x) for x in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def report(name: str, head_dim: int, capability: int, bias="none", mask="full", dtype="bf16") -> dict:
    made, tile = source(name, head_dim, bias, mask, dtype)
    compiled = triton.compile(
        made, target=GPUTarget("cuda", capability, 32), options={"num_warps": tile.warps, "num_stages": tile.stages})
    ptx = compiled.asm["ptx"]
    registers, spilled = usage(ptx, capability)
    count = {word: ptx.count(word) for word in ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async.cg")}
    return {"kernel": name, "head_dim": head_dim, "capability": capability, "bias": bias, "mask": mask,
            "shared": compiled.metadata.shared, "registers": registers, "spilled": spilled, **count}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])))
