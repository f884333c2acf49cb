"""Compile Triton kernels for an NVIDIA architecture on a machine without a GPU, one subprocess a configuration.

    found = compile_ahead("opengem.kernels.block.triton:_forward", types, constants, capability=90, num_warps=4)
    assert found["spill_bytes"] == 0 and "wgmma" in found["ptx"]

`types` maps argument names to Triton type strings ("*bf16", "i32", "fp32"). Pointers are taken as divisible by 16;
name further arguments (strides) in `aligned`. A compiler abort ends only the subprocess and raises CompileError.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile

SHARED_LIMIT = 227 * 1024  # bytes of shared memory one CTA may use on sm_90 and sm_100


class CompileError(AssertionError):
    """The compiler subprocess failed; the message ends with its standard error."""


def compile_ahead(kernel: str, types: dict[str, str], constants: dict, *, capability: int = 90,
                  aligned: tuple[str, ...] = (), timeout: int = 300, python: str = sys.executable, **options) -> dict:
    """Compile `module:function`; returns ptx, registers, spill_bytes, shared (bytes), warps. options: num_warps, ..."""
    request = {"kernel": kernel, "types": types, "constants": constants, "capability": capability,
               "aligned": list(aligned), "options": options}
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.run([python, "-m", "tests.kernels.aot"], input=json.dumps(request), capture_output=True,
                               text=True, env=environment, timeout=timeout)
    if child.returncode:
        raise CompileError(f"{kernel} for sm_{capability} with {constants} {options}: {child.stderr[-1500:]}")
    return json.loads(child.stdout.splitlines()[-1])


def _ptxas_usage(ptx: str, capability: int) -> tuple[int, int]:
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{capability}a", path, "-o", os.path.join(folder, "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    return max(registers), sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def _compile_here(request: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = request["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    types, constants = request["types"], request["constants"]
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
    pointers = {arg for arg, kind in signature.items() if kind.startswith("*")}
    aligned = pointers | set(request["aligned"])
    attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes),
                              target=GPUTarget("cuda", request["capability"], 32), options=request["options"])
    registers, spills = _ptxas_usage(compiled.asm["ptx"], request["capability"])
    return {"registers": registers, "spill_bytes": spills, "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps, "ptx": compiled.asm["ptx"]}


if __name__ == "__main__":
    print(json.dumps(_compile_here(json.load(sys.stdin))))
