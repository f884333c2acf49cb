"""Useful FLOPs of a run and its E2E MFU: useful FLOPs of real samples / (time x dense bf16 peak).

Useful: padding, recomputation, element-wise work and embedding look-ups count 0; attention counts what its mask lets
through; a training step is three forwards.
"""

from __future__ import annotations

from collections.abc import Callable

from opengem.efficiency.hardware import bf16_peak


def training_flops(forward: Callable[[dict[str, list[int]]], dict[str, int]], histories: dict[str, list[int]],
                   samples: int) -> int:
    """Useful FLOPs of training on `samples` samples.

    forward: `GEM.flops`, which is a sum over samples and streams. histories: stream -> number of samples by history
    length, index 0 first; so the count costs one call a distinct length, however long the run was.
    """
    empty = {stream: [0] for stream in histories}
    base = sum(forward(empty).values())
    total = base * samples
    for stream, counts in histories.items():
        for length, count in enumerate(counts):
            if count and length:
                total += count * (sum(forward({**empty, stream: [length]}).values()) - base)
    return 3 * total


def rates(flops_per_sample: float, samples_per_s: float | None, device: str) -> dict[str, float | None]:
    """useful_tflops and mfu (a fraction) of one device; None where the speed or the peak is not known."""
    tflops = flops_per_sample * samples_per_s / 1e12 if samples_per_s else None
    peak = bf16_peak(device)
    return {"useful_tflops": tflops, "mfu": tflops / peak if tflops is not None and peak else None}


def local(rows: list[dict], peak_tflops: float | None) -> float | None:
    """Local MFU (a fraction): the mean of each layer's own MFU, weighted by its share of the FLOPs.

    rows: one a layer, `flops` forward and `ms` of forward and backward together; rows without FLOPs do not count.
    None where the peak is not known. Source: the definition of Meta's GEM article.
    """
    total = sum(row["flops"] for row in rows)
    if not peak_tflops or not total:
        return None
    each = [(row["flops"], 3 * row["flops"] / (row["ms"] * 1e9 * peak_tflops)) for row in rows if row["flops"]]
    return sum(flops / total * own for flops, own in each)
