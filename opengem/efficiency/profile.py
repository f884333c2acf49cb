"""`opengem profile`: where the time of one training step goes, layer by layer.

    step = measure(job, batch)        # times, FLOPs and bytes of every layer; plain data, ready for JSON

Every layer is measured in place: on one GPU one kernel runs at a time, so the time of a layer's kernels is the time it
would take alone. What no kernel fills is the host's. Read `layers.py` and `trace.py` for how a kernel finds its layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from opengem.data.batch import Batch
from opengem.efficiency import hardware, trace
from opengem.efficiency.layers import STEP, Ranges, parts, ranged
from opengem.efficiency.workload import history_lengths

BACKWARD = 2  # FLOPs of a backward over those of its forward, for MFU: recomputation does not count
KINDS = {"lookup": "lookup", "embedding_update": "embedding update", "loss": "loss", "optimiser": "optimiser"}


def phases(job) -> dict[str, tuple[object, str]]:
    """Range -> (object, method) of what a `Job` does outside of the model's layers; inner methods win."""
    return {
        "casts": (job, "forward"), "lookup": (job.embeddings, "lookup"), "distribute": (job.embeddings, "distribute"),
        "loss": (job, "loss"), "clip and check": (job, "learn"), "optimiser": (job.optimizer, "step"),
        "embedding update": (job.embeddings, "step"),
    }  # fmt: skip


def measure(job, batch: Batch, warmup: int = 5, steps: int = 10, layers_of: Callable | None = None) -> dict:
    """Profile training steps of `job` on `batch`, which is on the job's device.

    warmup: steps before anything is measured (compilation, caches). steps: timed steps, without the profiler.
    layers_of: history lengths -> the model's layers, for a model that is not a `GEM` (default: `layers.parts`).
    Times are milliseconds; `rows` are one a layer, and one for each other part of the step.
    """
    job.model.train()

    def step() -> None:
        job.learn(job.loss(job.forward(batch), batch))

    lengths = history_lengths(batch)
    for _ in range(warmup):
        step()
    layers = layers_of(lengths) if layers_of else parts(job.model, lengths)
    times = timed(step, steps, job.device)
    with ranged(job.model, layers, phases(job)) as ranges:
        found = traced(step, ranges, job.device)
    device = _name(job.device)
    flops = sum(job.model.flops(lengths).values())
    result = {
        "device": device, "dtype": str(job.dtype).removeprefix("torch."), "samples": batch.batch_size,
        "tokens": sum(map(sum, lengths.values())), "step_ms": statistics.median(times), "step_times_ms": times,
        "busy_ms": trace.busy_ms(found), "flops": (1 + BACKWARD) * flops, "peak_tflops": hardware.bf16_peak(device),
        "rows": rows(layers, found),
    }  # fmt: skip
    return result | {"intervals": found}


def timed(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `steps` steps, from one start to the next."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]


def traced(step: Callable[[], None], ranges: Ranges, device: torch.device) -> list[trace.Interval]:
    """The intervals of one step under the profiler; a step before it takes the profiler's own start-up."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch_profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(2):
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return trace.intervals(trace.export(profiler), ranges)


def rows(layers: list, found: list[trace.Interval]) -> list[dict]:
    """One row a layer and one for each other owner, longest first."""
    table: dict[str, dict] = {
        part.name: {"name": part.name, "kind": part.kind, "flops": part.flops, "kernels": 0} for part in layers
    }
    for interval in found:
        row = table.setdefault(interval.owner, {"name": interval.owner, "kind": interval.owner, "flops": 0, "kernels": 0})
        key = f"{interval.phase}_ms"
        row[key] = row.get(key, 0.0) + interval.ms
        row["kernels"] += 1
    for row in table.values():
        for phase in ("forward", "backward", "recompute"):
            row.setdefault(f"{phase}_ms", 0.0)
        row["ms"] = row["forward_ms"] + row["backward_ms"] + row["recompute_ms"]
    return sorted(table.values(), key=lambda row: -row["ms"])


def _name(device: torch.device) -> str:
    import platform

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
