"""Sharded tables on several GPUs of one host: the three generations against one process, then V2 and V3 timed.

    torchrun --nproc-per-node 2 benchmarks/ladder/sparse_dist_check.py --out FILE.jsonl

Check: 20 steps of every generation with NCCL, the losses of one process that sees all samples; with and without the
input pipeline the same bits. Time: lookup, a dense stand-in of `--dense-ms`, update; peak and persistent bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
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
    return {"v1": (1, plain), "v2": (world, plain), "v3": (world, split), "v3 by chunks": (world, chunks)}


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
            source = Pipeline(batches, made) if piped else ((b, made(b)) for b in batches)
            worst = 0.0
            for step, (_, embedded) in enumerate(source):
                loss = loss_of(embedded, samples * world)
                loss.backward()
                made.step(0.05)
                total = loss.detach().clone()
                dist.all_reduce(total)
                worst = max(worst, abs(float(total) / wanted[step] - 1))
            made.check()
            final.append(made.storage.weight.clone())
        say({"check": name, "world": world, "worst_relative_loss": worst, "pipeline_same_bits": torch.equal(*final),
             "ok": worst < 1e-5 and torch.equal(*final)})  # fmt: skip


def make(name: str, rows: int, device: str, chunk_mb: int = 512):
    """(collection, bytes that it keeps on the device, measured)."""
    copies, config = generations(dist.get_world_size())[name]
    config = dataclasses.replace(config, check_replicas=False, chunk_mb=chunk_mb)
    described = schema(rows)
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    made = shard(described, list(described.features), config, device, 0, meshes(copies))
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


def time_steps(say, rank: int, world: int, device: str, dense_ms: float, timeline: Path | None) -> None:
    """A step of each generation: lookup, a dense stand-in forward and backward, update; through the input pipeline."""
    rows, samples = 2_000_000, 1024
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    batches = [batch(rows, samples, step * world + rank, device) for step in range(8)]
    for name in generations(world):
        made, persistent = make(name, rows, device)
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()

        def steps(count: int, products: int, made=made) -> list[torch.cuda.Event]:
            marks = []
            for _, embedded in Pipeline([batches[i % 8] for i in range(count)], made):
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                for _ in range(products):
                    a @ a
                loss_of(embedded, samples).backward()
                made.step(0.05)
            torch.cuda.synchronize()
            return marks

        for products in (int(dense_ms / 1.5), 0):
            marks = steps(24, products)
            times = sorted(x.elapsed_time(y) for x, y in zip(marks[4:], marks[5:], strict=False))
            peak = torch.cuda.max_memory_allocated() - begin
            say({"time": name, "world": world, "products": products, "step_ms": times[len(times) // 2],
                 "spread": times[-2] / times[1] - 1, "persistent_bytes": persistent,
                 "peak_beside_bytes": peak})  # fmt: skip
        if timeline is not None and name in ("v2", "v3"):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                steps(5, int(dense_ms / 1.5))
            if rank == 0:
                write_timeline(profiler, timeline / f"timeline_{name}.json")
        del made, steps  # the function keeps the tables too


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
    parser.add_argument("--timeline", type=Path, help="folder for what ran on the device in steps of V2 and V3")
    arguments = parser.parse_args()
    rank, world = mesh.start("cuda", timeout_s=60)
    device = f"cuda:{torch.cuda.current_device()}"

    def say(row: dict) -> None:
        if rank == 0:
            print(json.dumps(row), flush=True)
            with open(arguments.out, "a") as file:
                file.write(json.dumps(row) + "\n")

    with mesh.fail_together():
        check(say, rank, world, device)
        memory(say, rank, world, device)
        time_steps(say, rank, world, device, arguments.dense_ms, arguments.timeline)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
