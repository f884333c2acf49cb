"""Dense peak rates by device, in TFLOPS. An unknown device has no peak, and so no MFU: a guess would be worse.

Sources: NVIDIA H100, H200 and B200 data sheets, dense figures (the sheets' headline figures are with 2:4 sparsity,
twice as high). SXM parts; PCIe and NVL parts are slower and not listed.
"""

from __future__ import annotations

# exact device name as the driver gives it -> dense bf16 peak
BF16_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.5, "NVIDIA H200": 989.5, "NVIDIA B200": 2250.0}


def bf16_peak(device: str) -> float | None:
    """Dense bf16 TFLOPS of the device of this name, or None."""
    return BF16_TFLOPS.get(device)


def why_no_mfu(device: str) -> str:
    """The sentence that stands in place of an MFU."""
    return f"no MFU: the dense bf16 peak of {device!r} is not known; known: {', '.join(BF16_TFLOPS)}"
