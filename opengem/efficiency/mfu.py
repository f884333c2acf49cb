"""E2E MFU = Local MFU x Scaling Ratio.

E2E MFU: useful FLOPs of real samples / (time x GPUs x dense bf16 peak). Local MFU: each layer alone on one GPU, without
recomputation or communication, weighted by its share of the FLOPs. Scaling Ratio: what of it survives the rest of the
step, host gaps and distribution. After the efficiency framework of Meta's GEM article. What is useful: `flops.py`.
"""

from __future__ import annotations

from opengem.efficiency.flops import TRAINING
from opengem.efficiency.hardware import bf16_peak


def rates(flops_per_sample: float, samples_per_s: float | None, device: str) -> dict[str, float | None]:
    """useful_tflops and mfu (a fraction) of one device; None where the speed or the peak is not known."""
    tflops = flops_per_sample * samples_per_s / 1e12 if samples_per_s else None
    peak = bf16_peak(device)
    return {"useful_tflops": tflops, "mfu": tflops / peak if tflops is not None and peak else None}


def local(rows: list[dict], peak_tflops: float | None) -> float | None:
    """Local MFU (a fraction): the mean of the layers' own MFUs, weighted by their FLOPs; None without a known peak.

    rows: one a layer; `flops` forward, `ms` forward and backward together. Rows without FLOPs do not count.
    """
    layers = [row for row in rows if row["flops"]]
    total = sum(row["flops"] for row in layers)
    if not peak_tflops or not total:
        return None
    return sum(row["flops"] / total * of_layer(row, peak_tflops) for row in layers)


def of_layer(row: dict, peak_tflops: float) -> float:
    """MFU (a fraction) of one row of `local`."""
    return TRAINING * row["flops"] / (row["ms"] * 1e9 * peak_tflops)
