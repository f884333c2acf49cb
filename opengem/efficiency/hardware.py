"""Peak rates by device, and the rates a device reaches now. An unknown device has no peak, and so no MFU: a guess
would be worse.

Sources: NVIDIA H100, H200 and B200 data sheets, dense figures (the sheets' headline figures are with 2:4 sparsity,
twice as high) and memory bandwidth. SXM parts; PCIe and NVL parts are slower and not listed.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# exact device name as the driver gives it -> dense bf16 TFLOPS, GB/s of device memory
PEAKS = {
    "NVIDIA H100 80GB HBM3": (989.5, 3350.0),
    "NVIDIA H200": (989.5, 4800.0),
    "NVIDIA B200": (2250.0, 8000.0),
}


def bf16_peak(device: str) -> float | None:
    """Dense bf16 TFLOPS of the device of this name, or None."""
    return PEAKS[device][0] if device in PEAKS else None


def why_no_mfu(device: str) -> str:
    """The sentence that stands in place of an MFU."""
    return f"no MFU: the dense bf16 peak of {device!r} is not known; known: {', '.join(PEAKS)}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Roofs:
    """What bounds a layer: matrix products in TFLOPS, memory in GB/s; and where both figures are from."""

    tflops: float
    gbs: float
    source: str

    def ms(self, flops: float, bytes: float) -> tuple[float, str]:
        """(least milliseconds, which roof: "compute" or "memory")."""
        compute, memory = flops / self.tflops / 1e9, bytes / self.gbs / 1e6
        return (compute, "compute") if compute > memory else (memory, "memory")


def roofs(device: torch.device, dtype: torch.dtype) -> tuple[Roofs, Roofs]:
    """(the bound, what a matrix product and a copy reach now). The bound is the data sheet's where the device and
    bfloat16 are in it, else it is what was measured."""
    now = Roofs(*measured(device, dtype), "measured in this process")
    name = device_name(device)
    if name not in PEAKS or dtype != torch.bfloat16:
        return now, now
    return Roofs(*PEAKS[name], "data sheet"), now


def measured(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """TFLOPS of a square matrix product, GB/s of a copy (bytes read plus written): medians of a few runs."""
    large = device.type == "cuda"
    size, count = (8192, 2**29) if large else (1024, 2**24)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    product_ms, copy_ms = _median_ms(lambda: a @ b, device), _median_ms(lambda: target.copy_(source), device)
    return 2 * size**3 / product_ms / 1e9, 2 * source.nbytes / copy_ms / 1e6


def _median_ms(function: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])
