"""Launches that skip what Triton repeats on every call: binding the arguments and finding the compiled kernel."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from types import SimpleNamespace

import torch

_compiled: dict[tuple, tuple] = {}  # (compiled, kernel): an id stays that of one kernel while the kernel lives


def launch(kernel, grid: tuple[int, int, int], key: Hashable, arguments: tuple, constants: tuple, warps: int = 4,
           stages: int = 3, registers: int | None = None, cluster: int = 1) -> None:
    """`kernel[grid](*arguments, *constants)`, quickly from the second call with an equal `key` on.

    `key` tells apart what Triton specialises on: the device, dtypes, alignment of pointers and those integers (strides)
    that are not `do_not_specialize`. None takes the slow way. `cluster`: so many programs form a thread block cluster
    (`has_clusters`), as many times as `grid` says.
    """
    place = id(kernel), key, constants, warps, stages, registers, cluster
    if place in _compiled:
        _compiled[place][0][grid](*arguments, *constants)
        return
    options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    if cluster == 1:
        compiled = kernel[grid](*arguments, *constants, **options)
    else:
        compiled = kernel.warmup(*arguments, *constants, grid=grid, **options)
        compiled.packed_metadata = compiled.metadata.num_warps, cluster, compiled.metadata.shared
        compiled[grid](*arguments, *constants)
    if key is not None and compiled is not None:  # Triton's interpreter compiles nothing
        _compiled[place] = compiled, kernel


@cache
def has_clusters() -> bool:
    """Whether this version of Triton launches what a kernel's packed metadata says (warps, programs a cluster, bytes).

    With `num_ctas` Triton spreads one program over a cluster. Told so after compilation, its launcher makes a cluster
    of programs that know nothing of each other, for kernels that address their neighbours in assembly.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    facts = SimpleNamespace(num_warps=8, num_ctas=2, shared=1024)
    return getattr(CUDABackend, "pack_metadata", lambda *_: None)(None, facts) == (8, 2, 1024)


def kind_of(*tensors, facts: tuple = ()) -> tuple | None:
    """A `key` for `launch`: device and dtypes of the tensors and `facts`; None where one is not aligned."""
    return (tensors[0].device, *[x.dtype for x in tensors], *facts) if aligned(*tensors) else None


def aligned(*tensors) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes, as kernels are specialised for."""
    address = 0
    for x in tensors:
        address |= x.data_ptr()
    return address % 16 == 0


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of the device; 1 where there is no GPU (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
