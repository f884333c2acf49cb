"""`opengem profile`: where the time of one training step goes, layer by layer, and what bounds each layer.

    result = measure(job, batch)      # plain data, ready for JSON
    print(profile_text.table(result))

Every layer is measured in place: on one GPU one kernel runs at a time, so the time of a layer's kernels is the time it
would take alone. What no kernel fills is the host's. Three kinds of steps are run: timed ones without a profiler, one
whose operations are counted, and one under the profiler. Read `layers.py` and `trace.py` for how a kernel finds its
layer, `counting.py` for what a layer must do at least.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from opengem.data.batch import Batch
from opengem.efficiency import counting, flops, hardware, mfu, trace
from opengem.efficiency.layers import STEP, Part, Ranges, parts, ranged
from opengem.efficiency.workload import history_lengths
from opengem.sparse.lookup import cost as lookup_cost

PHASES = ("forward", "backward", "recompute")
KINDS = {"model": "between layers", "gradients": "gradient sums"}  # of ranges that are no layer, where not their name


def measure(job, batch: Batch, warmup: int = 5, steps: int = 10, layers_of: Callable | None = None,
            batch_ms: float = 0.0, count: bool = True) -> dict:
    """Profile training steps of `job` (a `job.Job`) on `batch`, which is on the job's device.

    warmup: steps before anything is measured (compilation, caches). steps: timed steps, without the profiler.
    count: also run a step that counts work, uncompiled, for the bounds (without, all bounds are 0).
    batch_ms: what the loader takes for a batch; what exceeds a step is waited for.
    layers_of: history lengths -> the model's layers, for a model that is not a `GEM` (default: `layers.parts`).
    Times are milliseconds. `rows`: one a layer, one for each other part of the step, and `host`, what no kernel fills
    (on a CPU: what the interpreter takes outside of layers). Worst first: by the milliseconds lost to the bound.
    """
    job.model.train()

    def step() -> None:
        job.learn(job.loss(job.forward(batch), batch))

    for _ in range(warmup):
        step()
    times = timed(step, steps, job.device)
    peak_bytes = torch.cuda.max_memory_allocated() if job.device.type == "cuda" else None
    bound, now = hardware.roofs(job.device, job.dtype)
    lengths = history_lengths(batch)
    layers = layers_of(lengths) if layers_of else parts(job.model, lengths)
    with ranged(job.model, layers, phases(job)) as ranges:
        work = counting.count(step, ranges, bound) if count else {}
        found, traced_ms = traced(step, ranges, job.device)
    if count:
        others(job, batch, work, bound)
    name = hardware.device_name(job.device)
    result = {
        "device": name, "dtype": str(job.dtype).removeprefix("torch."), "samples": batch.batch_size,
        "tokens": sum(map(sum, lengths.values())), "step_ms": statistics.median(times), "step_times_ms": times,
        "traced_ms": traced_ms, "busy_ms": trace.busy_ms(found), "peak_bytes": peak_bytes,
        "exposed_ms": trace.exposed_ms(found), "batch_ms": batch_ms,
        "bound": vars(bound), "now": vars(now), "peak_tflops": hardware.bf16_peak(name),
    }  # fmt: skip
    table = rows(layers, found, work)
    on_gpu = job.device.type == "cuda"
    result["host_ms"] = max(0.0, result["step_ms"] - result["busy_ms"]) if on_gpu else 0.0
    result["rows"] = [finish(row) for row in table]
    result["rows"].sort(key=lambda row: -row["lost_ms"])
    gem = getattr(job.model, "gem", job.model)
    result["flops"] = flops.TRAINING * sum(part.flops for part in layers)
    result["attention_flops"] = flops.TRAINING * flops.attention(gem, lengths)
    result |= shares(result)
    return result | {"kernels": kernels(found, result["rows"]), "timeline": timeline(found, result["rows"])}


def phases(job) -> dict[str, tuple[object, str]]:
    """Range -> (object, method) of what a `Job` does outside of the model's layers; inner methods win."""
    return {
        "casts": (job, "forward"), "lookup": (job.embeddings, "lookup"), "ids": (job.embeddings, "distribute"),
        "loss": (job, "loss"), "clip and check": (job, "learn"), "optimiser": (job, "update"),
        "embedding update": (job.embeddings, "step"),
    }  # fmt: skip


def others(job, batch: Batch, work: dict, roofs: hardware.Roofs) -> None:
    """Add to `work` the bytes that the parts outside of layers have to move."""
    parameters = sum(p.numel() for p in job.model.parameters())
    with torch.no_grad():
        ids = job.embeddings.distribute(batch).route.rows
    row = job.embeddings.storage.weight.element_size()
    looked_up = (ids.shape[0], ids.unique().shape[0], 0, ids.shape[0], job.embeddings.dim, row, False)
    grad = 4 if job.copies is None else 2
    for owner, phase, moved in (
        # parameter and two moments read and written, gradient read, copy written
        ("optimiser", "forward", (24 + grad + 2 * (grad == 2)) * parameters),
        ("clip and check", "forward", grad * parameters),
        ("lookup", "forward", lookup_cost.forward_bytes(*looked_up)),
        ("embedding update", "forward", lookup_cost.update_bytes(*looked_up)),
    ):
        work[owner, phase] = counting.Work()
        work[owner, phase].add(0, moved, roofs)


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


def traced(step: Callable[[], None], ranges: Ranges, device: torch.device) -> tuple[list[trace.Interval], float]:
    """(intervals, milliseconds) of a step under the profiler; a step before it takes the profiler's own start-up."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch_profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(2):
            start = time.perf_counter()
            with record_function(STEP):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    return trace.intervals(trace.export(profiler), ranges), 1e3 * seconds


def rows(layers: list[Part], found: list[trace.Interval], work: dict[tuple[str, str], counting.Work]) -> list[dict]:
    """One row a layer and one for each other owner: measured milliseconds, and what had to be done."""

    def empty(name: str, kind: str, forward_flops: int) -> dict:
        row = {"name": name, "kind": kind, "flops": forward_flops, "kernels": 0}
        return row | {f"{phase}_ms": 0.0 for phase in PHASES}

    table = {part.name: empty(part.name, part.kind, part.flops) for part in layers}
    for interval in found:
        kind = KINDS.get(interval.owner, interval.owner)
        row = table.setdefault(interval.owner, empty(interval.owner, kind, 0))
        row[f"{interval.phase}_ms"] += interval.ms
        row["kernels"] += 1
    for row in table.values():
        for phase in ("forward", "backward"):
            done = work.get((row["name"], phase), counting.Work())
            row[f"{phase}_bytes"], row[f"{phase}_executed_flops"] = done.bytes, done.flops
            row[f"{phase}_compute_ms"], row[f"{phase}_memory_ms"] = done.compute_ms, done.memory_ms
    return list(table.values())


def finish(row: dict) -> dict:
    """Add what follows from the columns of a row, or of a sum of rows."""
    compute, memory = (row[f"forward_{roof}_ms"] + row[f"backward_{roof}_ms"] for roof in ("compute", "memory"))
    moved = row["forward_bytes"] + row["backward_bytes"]
    ms = sum(row[f"{phase}_ms"] for phase in PHASES)
    return row | {
        "ms": ms, "bound_ms": compute + memory, "lost_ms": ms - compute - memory,
        "roof": "compute" if compute > memory else "memory" if memory else "launch",
        "intensity": flops.TRAINING * row["flops"] / moved if moved else None,
        "tflops": flops.TRAINING * row["flops"] / ms / 1e9 if ms else None,
        "gbs": moved / ms / 1e6 if ms else None,
    }  # fmt: skip


def by_kind(table: list[dict]) -> list[dict]:
    """Rows summed by kind, most milliseconds lost first; `name` says how many."""
    sums: dict[str, dict] = {}
    for row in table:
        at = sums.setdefault(row["kind"], defaultdict(float, kind=row["kind"]))
        at["count"] += 1
        for key, value in row.items():
            if key.endswith(("_ms", "_bytes", "flops")) and key not in ("bound_ms", "lost_ms", "tflops"):
                at[key] += value
        at["kernels"] += row["kernels"]
    for kind, row in sums.items():
        row["name"] = f"{kind} x{row['count']:.0f}" if row["count"] > 1 else kind
    return sorted(map(finish, map(dict, sums.values())), key=lambda row: -row["lost_ms"])


def shares(result: dict) -> dict:
    """The headline figures: fractions, or None where the device's peak is not known."""
    peak, step = result["peak_tflops"], result["step_ms"]
    attributed = sum(row["ms"] for row in result["rows"])
    whole = step if result["busy_ms"] and result["host_ms"] else result["traced_ms"]
    e2e = mfu.of(result["flops"] / step / 1e9, peak)
    local = mfu.local(result["rows"], peak)
    return {
        "useful_tflops": result["flops"] / step / 1e9, "samples_per_s": 1e3 * result["samples"] / step,
        "tokens_per_s": 1e3 * result["tokens"] / step, "e2e_mfu": e2e, "local_mfu": local,
        "scaling_ratio": e2e / local if e2e and local else None,
        "e2e_mfu_attention_x2.5": e2e and e2e * (1 + result["attention_flops"] / result["flops"] / 6),
        "attributed_ms": attributed, "accounted": (attributed + result["host_ms"]) / whole,
        "conditions": conditions(result),
    }  # fmt: skip


def conditions(result: dict) -> list[dict]:
    """What keeps a step from scaling, in milliseconds and in points of E2E MFU.

    Communication counts where nothing else runs beside it. One process has no other ranks to wait for.
    """
    executed = sum(row["forward_executed_flops"] + row["backward_executed_flops"] for row in result["rows"])
    again = sum(row["recompute_ms"] for row in result["rows"])
    costs = {
        "exposed communication and contention": result["exposed_ms"], "recomputation": again,
        "imbalance between ranks": 0.0,
        "host gaps and data waits": result["host_ms"] + max(0.0, result["batch_ms"] - result["step_ms"]),
    }  # fmt: skip
    peak, step = result["peak_tflops"], result["step_ms"]

    def points(ms: float) -> float | None:
        return 100 * result["flops"] / peak / 1e9 * (1 / (step - ms) - 1 / step) if peak and ms < step else None

    found = [{"condition": name, "ms": ms, "mfu_points": points(ms)} for name, ms in costs.items()]
    found[1]["executed_over_useful_flops"] = executed / result["flops"] if result["flops"] else None
    return found


def kernels(found: list[trace.Interval], table: list[dict], most: int = 60) -> list[dict]:
    """The kernels that take longest, with the operation that launched them, its input shapes and its kind of layer."""
    kinds = {row["name"]: row["kind"] for row in table}
    sums: dict[tuple, list[float]] = defaultdict(list)
    for i in found:
        sums[kinds[i.owner], i.phase, i.name, i.op].append(i.ms)
    longest = sorted(sums.items(), key=lambda item: -sum(item[1]))[:most]
    keys = ("kind", "phase", "kernel", "op")
    return [dict(zip(keys, key, strict=True)) | {"ms": sum(ms), "count": len(ms)} for key, ms in longest]


def timeline(found: list[trace.Interval], table: list[dict]) -> list[list]:
    """[start ms, length ms, kind, phase] of stretches of the step; neighbours of one kind are one stretch."""
    kinds = {row["name"]: row["kind"] for row in table}
    stretches = []
    for (kind, phase), run in groupby(found, key=lambda i: (kinds[i.owner], i.phase)):
        run = list(run)
        length = max(i.start + i.ms for i in run) - run[0].start
        stretches.append([round(run[0].start, 4), round(length, 4), kind, phase])
    return stretches


def largest_batch(job, batch_of: Callable[[int], Batch], probe: int, limit: int, headroom: float = 0.97) -> Batch:
    """The largest batch of at most `limit` samples with which a training step fits the GPU, a multiple of 8 or `limit`.

    batch_of: samples -> batch on the device. What forward holds of `probe` and of half as many samples tells what a
    sample takes and what a step takes besides; a size that fits tells it better, and one that does not is shrunk by a
    tenth. torch.OutOfMemoryError if not even 8 samples fit.
    """
    made = [held(job, batch_of(samples)) for samples in (probe, probe // 2, probe)]  # the first makes workspaces, state
    each = max(1.0, (made[2] - made[1]) / (probe - probe // 2))
    besides = made[2] - probe * each
    room = headroom * torch.cuda.get_device_properties(job.device).total_memory
    room -= torch.cuda.memory_allocated() + besides
    best, size = None, min(limit, max(8, int(room / each) // 8 * 8))
    while best is None or size > best.batch_size:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            batch = batch_of(size)
            each = max(1.0, (held(job, batch) - besides) / size)
            torch.cuda.synchronize()
            best, size = batch, min(limit, int(room / each) // 8 * 8)
        except torch.OutOfMemoryError:
            if size <= 8:
                raise
            limit, size = size - 8, max(8, int(0.9 * size) // 8 * 8)
            batch = None
            for x in job.model.parameters() if job.copies is None else job.copies.of.values():
                x.grad = None
            job.embeddings.discard()
    return best


def held(job, batch: Batch) -> int:
    """Bytes on the GPU that the forward of a training step leaves for its backward; runs the whole step."""
    before = torch.cuda.memory_allocated()
    loss = job.loss(job.forward(batch), batch)
    bytes = torch.cuda.memory_allocated() - before
    job.learn(loss)
    return bytes
