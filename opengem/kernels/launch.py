"""Launches that skip what Triton repeats on every call: binding the arguments and finding the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from inspect import getclosurevars
from types import SimpleNamespace

import torch

_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # the current one; without a GPU, none
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_starters: dict[tuple, tuple] = {}  # (starter, Triton's hooks, kernel): its id stays its own while it lives


def launch(kernel, grid: tuple[int, int, int], key: Hashable, arguments: tuple, constants: tuple, warps: int = 4,
           stages: int = 3, registers: int | None = None, cluster: int = 1) -> None:
    """`kernel[grid](*arguments, *constants)`, quickly from the second call with an equal `key` on.

    `key` tells apart what Triton specialises on: the device, dtypes, alignment of pointers and those integers (strides)
    that are not `do_not_specialize`. None takes the slow way. As Triton does, this launches on the current device and
    stream. `cluster`: so many programs form a thread block cluster (`has_clusters`), as many times as `grid` says.
    """
    device = -1 if key is None else _device()
    place = id(kernel), key, constants, warps, stages, registers, cluster, device
    found = _starters.get(place)
    if found is not None:
        start, hooks, _ = found
        if not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls:  # no profiler of Triton's
            start(grid, _stream(device), arguments, constants)
            return
    options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    if cluster == 1:
        compiled = kernel[grid](*arguments, *constants, **options)
    else:
        compiled = kernel.warmup(*arguments, *constants, grid=grid, **options)
        compiled.packed_metadata = compiled.metadata.num_warps, cluster, compiled.metadata.shared
        compiled[grid](*arguments, *constants)
    if key is not None and compiled is not None:  # Triton's interpreter compiles nothing
        from triton import knobs

        _starters[place] = _starter(compiled), knobs.runtime, kernel


def _starter(compiled) -> Callable:
    """What launches `compiled`, given (grid, stream, arguments, constants); tensor descriptors come first.

    The launcher that Triton 3.6 compiles is called past the Python around it, which takes longer than the launch.
    Another version of Triton, and a kernel that wants scratch memory, keep that Python.
    """
    import triton

    run, function, facts = compiled.run, compiled.function, compiled.packed_metadata
    boxes = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    first = list(compiled.src.signature.values())[: len(boxes)]
    if (not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size
            or not all(str(kind).startswith("tensordesc") for kind in first)):
        return lambda grid, stream, arguments, constants: run(
            *grid, stream, function, facts, None, None, None, *arguments, *constants)
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    call, encode = run.launch, triton.runtime.driver.active.utils.fill_tma_descriptor
    facts = run.launch_cooperative_grid, run.launch_pdl, None, None, facts, None, None, None
    if boxes:
        call = getclosurevars(call).nonlocals["launcher"]
    boxes = [(x["swizzle"], x["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[x["elem_type"]], x["block_size"]) for x in boxes]

    def start(grid, stream, arguments, constants):
        described = []
        for x, box in zip(arguments, boxes, strict=False):
            shape, strides = x.shape, x.strides
            described.append(encode(x.base.data_ptr(), *box, shape, strides, int(x.padding == "nan")))
            described += shape
            described += strides
        call(*grid, stream, function, *facts, *described, *arguments[len(boxes):], *constants)

    return start


@cache
def has_clusters() -> bool:
    """Whether this version of Triton launches what a kernel's packed metadata says (warps, programs a cluster, bytes).

    With `num_ctas` Triton spreads one program over a cluster. Told so after compilation, its launcher makes a cluster
    of programs that know nothing of each other, for kernels that address their neighbours in assembly.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    facts = SimpleNamespace(num_warps=8, num_ctas=2, shared=1024)
    return getattr(CUDABackend, "pack_metadata", lambda *_: None)(None, facts) == (8, 2, 1024)


def described(like, x: torch.Tensor, **fields):
    """The tensor descriptor `like`, of `x` and with these fields; to check a new one takes longer than a launch."""
    descriptor = object.__new__(type(like))
    descriptor.__dict__ = {**like.__dict__, "base": x, **fields}
    return descriptor


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
