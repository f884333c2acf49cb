"""E2E MFU = Local MFU x Scaling Ratio.

E2E MFU: useful FLOPs of real samples / (time x GPUs x dense bf16 peak). Local MFU: each layer alone on one GPU, without
recomputation or communication, weighted by its share of the FLOPs. Scaling Ratio: what of it survives the rest of the
step, host gaps and distribution. After the efficiency framework of Meta's GEM article. What is useful: `flops.py`.
"""

from __future__ import annotations

import warnings

from opengem.efficiency.flops import TRAINING
from opengem.efficiency.hardware import bf16_peak


def of(tflops: float | None, peak_tflops: float | None) -> float | None:
    """The fraction of the peak; None where the rate or the peak is not known, and, with a warning, above the peak."""
    if tflops is None or not peak_tflops:
        return None
    if tflops > peak_tflops:
        warnings.warn(f"no MFU: {tflops:.4g} TFLOPS are above the peak of {peak_tflops:.4g}; the count of FLOPs or "
                      "the clock must be wrong", stacklevel=2)  # fmt: skip
        return None
    return tflops / peak_tflops


def rates(
    flops_per_sample: float, samples_per_s: float | None, device: str, devices: int = 1
) -> dict[str, float | None]:
    """useful_tflops of a job on some devices and its mfu (a fraction); None where the speed or peak is not known."""
    tflops, peak = flops_per_sample * samples_per_s / 1e12 if samples_per_s else None, bf16_peak(device)
    return {"useful_tflops": tflops, "mfu": of(tflops, peak and peak * devices)}


def local(rows: list[dict], peak_tflops: float | None) -> float | None:
    """Local MFU (a fraction): the mean of the layers' own MFUs, weighted by their FLOPs; None without a known peak.

    rows: one a layer; `flops` forward, milliseconds `forward_ms` and `backward_ms`. Rows without FLOPs do not count.
    """
    layers = [row for row in rows if row["flops"]]
    total = sum(row["flops"] for row in layers)
    own = [of(TRAINING * row["flops"] / (row["forward_ms"] + row["backward_ms"]) / 1e9, peak_tflops) for row in layers]
    if not total or None in own:
        return None
    return sum(row["flops"] / total * fraction for row, fraction in zip(layers, own, strict=True))
