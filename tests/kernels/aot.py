"""Compile Triton and Gluon kernels for an NVIDIA architecture on a machine without a GPU, in a process of their own.

    found = compile_ahead("opengem.kernels.block.triton:_forward", types, constants, capability=90, num_warps=4)
    assert_on_tensor_cores(found)
    first, second = compile_all([job(...), job(...)])  # one process for several

`types` maps argument names, or patterns of them, to Triton type strings ("*bf16", "i32", "fp32"); the first that fits
counts. A tensor descriptor is its dtype and box, "bf16[64,128]", with the default layout. Pointers are taken as
divisible by 16; `aligned` holds patterns of further such arguments (strides). Constants a kernel lacks are left out.
A compiler abort ends only the subprocess and raises CompileError.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

SHARED_LIMIT = 227 * 1024  # bytes of shared memory one CTA may use on sm_90 and sm_100


class CompileError(AssertionError):
    """The compiler subprocess failed; the message ends with its standard error."""


def job(kernel: str, types: dict[str, str], constants: dict, *, capability: int = 90, aligned: tuple[str, ...] = (),
        **options) -> dict:
    """What `compile_all` takes: kernel is `module:function`; options are num_warps, num_stages, ..."""
    return {"kernel": kernel, "types": types, "constants": constants, "capability": capability, "aligned": aligned,
            "options": options}


def compile_all(jobs: list[dict]) -> list[dict]:
    """For each job: capability, ptx, registers, spill_bytes, shared (bytes), warps, serialised (wgmma made to wait)."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.run([sys.executable, "-m", "tests.kernels.aot"], input=json.dumps(jobs), text=True,
                               capture_output=True, env=environment, timeout=300)
    found = [json.loads(line) for line in child.stdout.splitlines()]
    if child.returncode:
        raise CompileError(f"{jobs[len(found):][:1]}: {child.stderr[-1500:]}")
    return found


def compile_ahead(kernel: str, types: dict[str, str], constants: dict, **how) -> dict:
    """`compile_all` of one `job`."""
    return compile_all([job(kernel, types, constants, **how)])[0]


def assert_on_tensor_cores(found: dict, spill_bytes: int = 0) -> None:
    """wgmma (sm_90) or tcgen05 (sm_100) and never mma.sync, no more spills than given, and shared memory that fits."""
    ptx, rest = found["ptx"], {name: value for name, value in found.items() if name != "ptx"}
    assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}[found["capability"]] in ptx and "mma.sync" not in ptx, rest
    assert found["spill_bytes"] <= spill_bytes and found["shared"] <= SHARED_LIMIT, rest


def barriers(ptx: str) -> list[int]:
    """Where in shared memory barriers are made, lowest first."""
    places, found = {}, []
    for line in ptx.splitlines():  # in order: every function numbers its registers anew
        if move := re.search(r"mov\.b32\s+(%r\d+), global_smem;", line):
            places[move[1]] = 0
        elif add := re.search(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", line):
            places[add[1]] = places.get(add[2], 0) + int(add[3])
        elif made := re.search(r"mbarrier\.init\S+ \[(%r\d+|global_smem)(?:\+(\d+))?\]", line):
            found.append(places.get(made[1], 0) + int(made[2] or 0))
    return sorted(found)


def assert_barriers_apart(found: dict) -> None:
    """All barriers side by side behind the tiles. The compiler gives the memory of one that nobody waits for, or waits
    for any more, to a tile; the SM, which holds barriers in a cache of its own, writes it back over that tile when
    another process takes its turn."""
    places = barriers(found["ptx"])
    assert places and found["shared"] - places[0] <= 512, (places, found["shared"])
    assert all(after - before <= 64 for before, after in zip(places, places[1:], strict=False)), places


def _first_fit(patterns: dict[str, str], name: str) -> str:
    return next(kind for pattern, kind in patterns.items() if fnmatchcase(name, pattern))


def _with_layout(kind: str) -> str:
    if not kind.endswith("]"):
        return kind
    from triton.experimental.gluon import language as gl

    dtype, box = kind[:-1].split("[")
    layout = gl.NVMMASharedLayout.get_default_for([int(n) for n in box.split(",")], gl.dtype(dtype))
    return f"tensordesc<{kind},{layout!r}>"


def _ptxas(ptx: str, capability: int) -> dict:
    """What a plain `ptxas -v` reports; the flags that Triton adds differ from version to version."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{capability}a", path, "-o", path.with_suffix(".cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
            "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)),
            "serialised": "are serialized" in log}


def _compile_here(kernel: str, types: dict, constants: dict, capability: int, aligned: list, options: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    module, function = kernel.split(":")
    kernel = getattr(importlib.import_module(module), function)
    missing = {p.name for p in kernel.params if p.is_constexpr} - constants.keys()
    assert not missing, f"{function} needs {missing}"
    constants = {arg: value for arg, value in constants.items() if arg in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else _with_layout(_first_fit(types, arg))
                 for arg in kernel.arg_names}
    attributes = {(at,): [["tt.divisibility", 16]] for at, (arg, kind) in enumerate(signature.items())
                  if kind.startswith("*") or any(fnmatchcase(arg, pattern) for pattern in aligned)}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(source(kernel, signature, constants, attributes),
                              target=GPUTarget("cuda", capability, 32), options=options)
    return {"capability": capability, "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
            "ptx": compiled.asm["ptx"], **_ptxas(compiled.asm["ptx"], capability)}


if __name__ == "__main__":
    for request in json.load(sys.stdin):
        print(json.dumps(_compile_here(**request)), flush=True)
