"""Sharded tables on several GPUs of one host: the three generations against one process, then V2 and V3 timed.

    torchrun --nproc-per-node 2 benchmarks/ladder/sparse_dist_check.py --out FILE.jsonl

Check: 20 steps of every generation with NCCL, the losses of one process that sees all samples; with and without the
input pipeline the same bits. Time: lookup, a dense stand-in of `--dense-ms`, update; peak and persistent bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from opengem import mesh
from opengem.config import SparseConfig
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.jagged import Jagged
from opengem.sparse.collection import EmbeddingCollection
from opengem.sparse.fully_sharded_2d import FullyShardedTables
from opengem.sparse.joined import JoinedCollections
from opengem.sparse.pipeline import Pipeline
from opengem.sparse.sharded import shard

TABLES, LENGTH = 8, 50


def schema(rows: int) -> Schema:
    attributes = tuple(Feature(f"a{i}", rows=rows, table=f"t{i}") for i in range(TABLES))
    return Schema("bench", (Stream("s", attributes),), (Feature("user", rows=rows),), (Label("y"),), {"train": (0, 1)})


def batch(rows: int, samples: int, seed: int, device: str) -> Batch:
    g = torch.Generator(device).manual_seed(seed)
    lengths = torch.randint(0, 2 * LENGTH, (samples,), generator=g, device=device)
    total = int(lengths.sum())

    def ids(count: int) -> torch.Tensor:
        return (torch.rand(count, generator=g, device=device) ** 4 * rows).long().clamp(max=rows - 1)

    first = Jagged.from_lengths(ids(total), lengths, 2 * LENGTH)
    zeros = torch.zeros(samples, device=device)
    return Batch(
        {f"s.a{i}": first.with_values(ids(total)) for i in range(TABLES)}, {"user": ids(samples)},
        {"y": zeros}, zeros + 1, zeros.long(), zeros.long(),
    )  # fmt: skip


def loss_of(embedded, samples: int) -> torch.Tensor:
    parts = [*(x.values for x in embedded.sequences.values()), *embedded.features.values()]
    return sum(torch.tanh(p + 0.1).square().sum() for p in parts) / samples


def joined(parts: list[Batch]) -> Batch:
    """One batch of the samples of all ranks."""

    def join(pieces):
        if isinstance(pieces[0], Jagged):
            values, lengths = (torch.cat([getattr(p, n) for p in pieces]) for n in ("values", "lengths"))
            return Jagged.from_lengths(values, lengths, 2 * LENGTH)
        return torch.cat(pieces)

    sequences = {k: join([p.sequences[k] for p in parts]) for k in parts[0].sequences}
    features = {k: join([p.features[k] for p in parts]) for k in parts[0].features}
    rest = (join([getattr(p, n) for p in parts]) for n in ("weights", "timestamps", "rows"))
    return Batch(sequences, features, {"y": join([p.labels["y"] for p in parts])}, *rest)


def generations(world: int) -> dict[str, tuple[int, SparseConfig]]:
    """Name -> (copies, options); all copies are checked bit for bit after each step."""
    plain = SparseConfig(dim=64, check_replicas=True)
    split = SparseConfig(dim=64, check_replicas=True, fully_shard=True)
    chunks = SparseConfig(dim=64, fully_shard=True, reads="chunks", chunk_mb=1)
    columns = SparseConfig(dim=64, placement={f"t{i}": "column" for i in range(TABLES)})
    made = {"v1": (1, plain), "v2": (world, plain), "v3": (world, split), "v3 by chunks": (world, chunks)}
    return made | {"v1 by columns": (1, columns)}


@functools.cache
def meshes(copies: int) -> mesh.Mesh:
    """Made once: each has communicators of its own."""
    return mesh.build(mesh.MeshSpec(sparse_replica=copies), "cuda")


def check(say, rank: int, world: int, device: str) -> None:
    rows, samples = 20_000, 256
    described = schema(rows)
    features = list(described.features)
    alone = EmbeddingCollection(described, features, SparseConfig(dim=64), device, 0)
    wanted = []
    for step in range(20):
        whole = joined([batch(rows, samples, step * world + r, device) for r in range(world)])
        loss = loss_of(alone(whole), samples * world)
        loss.backward()
        alone.step(0.05)
        wanted.append(float(loss.detach()))
    for name, (copies, config) in generations(world).items():
        final = []
        for piped in (False, True):
            made = shard(described, features, config, device, 0, meshes(copies))
            batches = [batch(rows, samples, step * world + rank, device) for step in range(20)]
            source = Pipeline(batches, made) if piped else ((b, made.distribute(b)) for b in batches)
            worst = 0.0
            for step, (_, ids) in enumerate(source):
                embedded = made.lookup(ids)
                if piped:
                    source.ahead()
                loss = loss_of(embedded, samples * world)
                loss.backward()
                made.step(0.05)
                total = loss.detach().clone()
                dist.all_reduce(total)
                worst = max(worst, abs(float(total) / wanted[step] - 1))
            made.check()
            parts = made.parts if isinstance(made, JoinedCollections) else [made]
            final.append(torch.cat([part.storage.weight.flatten() for part in parts]))
        say({"check": name, "world": world, "worst_relative_loss": worst, "pipeline_same_bits": torch.equal(*final),
             "ok": worst < 1e-5 and torch.equal(*final)})  # fmt: skip


def make(name: str, rows: int, device: str, chunk_mb: int = 512):
    """(collection, bytes that it keeps on the device, measured)."""
    copies, config = generations(dist.get_world_size())[name.removesuffix(", parts in order")]
    config = dataclasses.replace(config, check_replicas=False, chunk_mb=chunk_mb)
    described = schema(rows)
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    turns = FullyShardedTables._turns
    if name.endswith("in order"):
        FullyShardedTables._turns = lambda self, ranks: [0] * self.chunks
    made = shard(described, list(described.features), config, device, 0, meshes(copies))
    FullyShardedTables._turns = turns
    torch.cuda.synchronize()
    return made, torch.cuda.memory_allocated() - begin


def memory(say, rank: int, world: int, device: str) -> None:
    """Persistent bytes of a copied and a fully sharded collection, and what reading by chunks needs beside them."""
    kept = {}
    for name in ("v2", "v3", "v3 by chunks"):
        made, kept[name] = make(name, 2_000_000, device, chunk_mb=256)
        small = batch(2_000_000, 8, rank, device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            made(small)
        torch.cuda.synchronize()
        beside = torch.cuda.max_memory_allocated() - before
        say({"memory": name, "world": world, "computed_bytes": made.num_bytes(), "measured_bytes": kept[name],
             "of_v2_over_copies": kept[name] * world / kept["v2"], "beside_in_a_lookup": beside,
             "chunk_bytes": 256 << 20})  # fmt: skip
        del made


# label -> (generation, ids ahead under the dense work, rows read ahead)
VARIANTS = {
    "v2": ("v2", True, True),
    "v3": ("v3", True, True),
    "v3, parts in order": ("v3, parts in order", True, True),
    "v3, not read ahead": ("v3", True, False),
    "v3 by chunks": ("v3 by chunks", True, True),
    "v3 by chunks, not read ahead": ("v3 by chunks", True, False),
    "v1": ("v1", True, True),
    "v1 by columns": ("v1 by columns", True, True),
    "v2, ids before the dense work": ("v2", False, True),
    "v3, ids before the dense work": ("v3", False, False),
}


@contextlib.contextmanager
def variant(rows_ahead: bool):
    """Inside the block fully sharded tables read ahead or not."""
    saved = FullyShardedTables.read_ahead
    if not rows_ahead:
        FullyShardedTables.read_ahead = lambda self, request, dtype, learning: request
    yield
    FullyShardedTables.read_ahead = saved


def steps(made, batches: list[Batch], count: int, products: int, ids_under: bool, a) -> list[torch.cuda.Event]:
    """Lookup, a dense stand-in of `products` matrix products, backward, update; an event at the start of each step."""
    marks, pipe = [], Pipeline([batches[i % len(batches)] for i in range(count)], made, even=True)
    for _, ids in pipe:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        embedded = made.lookup(ids)
        if not ids_under:
            pipe.ahead()
        for _ in range(products):
            a @ a
        pipe.ahead()
        loss_of(embedded, batches[0].batch_size).backward()
        made.step(0.05)
    torch.cuda.synchronize()
    return marks


def time_steps(say, rank: int, world: int, device: str, dense_ms: float, labels: list[str], repeats: int = 3) -> None:
    """The variants in turn, several times over; medians over all steps of a variant."""
    rows, samples = 2_000_000, 1024
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    batches = [batch(rows, samples, step * world + rank, device) for step in range(8)]
    made = {name: make(name, rows, device)[0] for name in dict.fromkeys(VARIANTS[label][0] for label in labels)}
    times: dict[str, list[float]] = {label: [] for label in labels}
    for _ in range(repeats):
        for label in labels:
            name, ids_under, rows_ahead = VARIANTS[label]
            with variant(rows_ahead):
                marks = steps(made[name], batches, 16, int(dense_ms / 1.5), ids_under, a)
            times[label] += [x.elapsed_time(y) for x, y in zip(marks[3:], marks[4:], strict=False)]
    for label in labels:
        low, middle, high = statistics.quantiles(times[label], n=4)
        base = statistics.median(times["v2"]) if "v2" in times else None
        say({"time": label, "world": world, "step_ms": middle, "spread": (high - low) / middle,
             "over_v2": base and middle / base - 1})  # fmt: skip


def timeline(rank: int, world: int, device: str, dense_ms: float, labels: list[str], folder: Path) -> None:
    rows, samples = 2_000_000, 1024
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    batches = [batch(rows, samples, step * world + rank, device) for step in range(4)]
    for label in labels:
        name, ids_under, rows_ahead = VARIANTS[label]
        made = make(name, rows, device)[0]
        with variant(rows_ahead):
            steps(made, batches, 4, 4, ids_under, a)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                steps(made, batches, 5, int(dense_ms / 1.5), ids_under, a)
        write_timeline(profiler, folder / f"timeline_{label.replace(' ', '_').replace(',', '')}_{rank}.json")
        del made


def exchanges(say, rank: int, world: int, device: str) -> None:
    """What one exchange of `mib` MiB a rank, half of it its own, costs alone; and the all-gather of as much."""
    group = dist.new_group()
    for mib in (2, 12, 48):
        rows = mib * 4096
        values, whole = torch.randn(rows, 64, device=device), torch.empty(rows * world, 64, device=device)
        counts = [rows // world] * world
        kinds = {
            "all_to_all": lambda: mesh.exchange(values, counts, counts, group),  # noqa: B023
            "all_gather": lambda: mesh.all_gather(whole, values, group=group),  # noqa: B023
        }
        for kind, call in kinds.items():
            marks = []
            for _ in range(12):
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                call()
            torch.cuda.synchronize()
            times = sorted(x.elapsed_time(y) for x, y in zip(marks[3:], marks[4:], strict=False))
            say({"exchange": kind, "world": world, "mib": mib, "ms": times[len(times) // 2]})


def write_timeline(profiler, path: Path) -> None:
    """What ran on the device: [stream, begin us, length us, name]."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        events = json.loads(whole.read_text())["traceEvents"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    path.write_text(json.dumps([[e["args"].get("stream"), e["ts"], e["dur"], e["name"][:60]] for e in device]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dense-ms", type=float, default=30.0)
    parser.add_argument("--parts", nargs="+", default=["check", "memory", "time", "exchanges"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--timeline", type=Path, help="folder for what ran on the device in steps of V2 and V3")
    arguments = parser.parse_args()
    rank, world = mesh.start("cuda", timeout_s=60)
    device, begin = f"cuda:{torch.cuda.current_device()}", time.perf_counter()

    def say(row: dict) -> None:
        if rank == 0:
            row |= {"at": round(time.perf_counter() - begin, 1)}
            print(json.dumps(row), flush=True)
            with open(arguments.out, "a") as file:
                file.write(json.dumps(row) + "\n")

    with mesh.fail_together():
        for part in arguments.parts:
            if part == "time":
                time_steps(say, rank, world, device, arguments.dense_ms, arguments.variants)
            else:
                {"check": check, "memory": memory, "exchanges": exchanges}[part](say, rank, world, device)
        if arguments.timeline:
            timeline(rank, world, device, arguments.dense_ms, ["v2", "v3", "v3 by chunks"], arguments.timeline)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
