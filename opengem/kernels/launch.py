"""Launches that skip what Triton repeats on every call: binding the arguments and finding the compiled kernel."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch

_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # the current one; without a GPU, none
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_compiled: dict[tuple, tuple] = {}  # what a launch takes, and the kernel: its id stays its own while it lives


def launch(kernel, grid: tuple[int, int, int], key: Hashable, arguments: tuple, constants: tuple, warps: int = 4,
           stages: int = 3, registers: int | None = None) -> None:
    """`kernel[grid](*arguments, *constants)`, quickly from the second call with an equal `key` on.

    `key` tells apart what Triton specialises on: the device, dtypes, alignment of pointers and those integers (strides)
    that are not `do_not_specialize`. None takes the slow way. As Triton does, this launches on the current device and
    stream.
    """
    device = -1 if key is None else _device()
    place = id(kernel), key, constants, warps, stages, registers, device
    found = _compiled.get(place)
    if found is not None:
        run, function, facts, hooks, _ = found
        if not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls:  # no profiler of Triton's
            run(*grid, _stream(device), function, facts, None, None, None, *arguments, *constants)
            return
    limit = {} if registers is None else {"maxnreg": registers}
    compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages, **limit)
    if key is not None and compiled is not None:  # Triton's interpreter compiles nothing
        from triton import knobs

        _compiled[place] = compiled.run, compiled.function, compiled.packed_metadata, knobs.runtime, kernel


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
