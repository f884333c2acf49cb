"""What the processes of the distributed tests run, and how they are started."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from opengem import mesh
from opengem.config import SparseConfig
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.jagged import Jagged
from opengem.sparse.collection import EmbeddingCollection
from opengem.sparse.plan import all_row_wise
from opengem.sparse.sharded import shard

DIM, BATCH = 8, 12
SCHEMA = Schema(
    name="toy",
    streams=(Stream("views", (Feature("item", rows=61, table="items"), Feature("shop", rows=6))),),
    features=(
        Feature("item", rows=61, table="items", role="item"),
        Feature("hour", rows=24),
        Feature("tags", "ids", rows=17, table="tags"),
    ),
    labels=(Label("click"),),
    splits={"train": (0, 10)},
)
FEATURES = list(SCHEMA.features)
ROWS = {"items": 61, "shop": 6, "hour": 24, "tags": 17}


def spawn(worker, world: int, *args, seconds: float = 100.0) -> list:
    """Run `worker(rank, world, *args)` in `world` Gloo processes; returns what each of them returned."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_enter, (world, folder, worker, args), nprocs=world, join=False)
        end = time.monotonic() + seconds
        while not context.join(max(end - time.monotonic(), 0.0), grace_period=2):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{worker.__name__} on {world} processes took more than {seconds} s")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def _enter(rank: int, world: int, folder: str, worker, args) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    torch.save(worker(rank, world, *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def random_batch(step: int, size: int = BATCH) -> Batch:
    """Random histories (some empty) and ids; `shop` only ever sees one hot id."""
    g = torch.Generator().manual_seed(step)

    def ids(rows: int, count: int) -> torch.Tensor:
        return torch.randint(rows, (count,), generator=g)

    lengths = torch.randint(0, 6, (size,), generator=g)
    tags = torch.randint(0, 4, (size,), generator=g)
    total = int(lengths.sum())
    history = Jagged.from_lengths(ids(61, total), lengths)
    return Batch(
        sequences={"views.item": history, "views.shop": history.with_values(torch.full((total,), 5))},
        features={
            "item": ids(61, size),
            "hour": ids(24, size),
            "tags": Jagged.from_lengths(ids(17, int(tags.sum())), tags),
        },
        labels={"click": torch.rand(size, generator=g)},
        weights=torch.ones(size),
        timestamps=torch.arange(size),
        rows=torch.arange(size),
    )


def part(batch: Batch, rank: int, world: int, step: int) -> Batch:
    """This rank's samples. On odd steps rank 1 has none and rank 0 its share as well."""
    edges = [batch.batch_size * r // world for r in range(world + 1)]
    if step % 2 and world > 1:
        edges[1] = edges[2]
    first, last = edges[rank], edges[rank + 1]

    def cut(x):
        if isinstance(x, dict):
            return {name: cut(value) for name, value in x.items()}
        if isinstance(x, Jagged):
            return Jagged.from_lengths(x.values[x.offsets[first] : x.offsets[last]], x.lengths[first:last])
        return x[first:last]

    return Batch(**{field.name: cut(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def loss_of(batch: Batch, embedded) -> torch.Tensor:
    """A per-sample squared error over everything that was looked up, summed and divided by the global batch size."""
    score = torch.zeros(batch.batch_size)
    for i, (_, history) in enumerate(sorted(embedded.sequences.items())):
        each = torch.tanh(history.values * (i + 1.5)).sum(1)
        score = score.index_add(0, history.row_to_sample, each)
    for i, (_, vectors) in enumerate(sorted(embedded.features.items())):
        score = score + torch.tanh(vectors * (i + 1)).sum(1)
    return (score - batch.labels["click"]).square().sum() / BATCH


def train(collection: EmbeddingCollection, rank: int, world: int, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        batch = part(random_batch(step), rank, world, step)
        loss = loss_of(batch, collection(batch))
        loss.backward()
        assert bool(collection.finite())
        collection.step(0.05)
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    return losses


def one_process(steps: int, **options) -> tuple[list[float], dict]:
    """The reference: every sample in this process."""
    collection = EmbeddingCollection(SCHEMA, FEATURES, config(**options), "cpu", seed=3)
    return train(collection, 0, 1, steps), copy(collection.state_dict())


def config(**options) -> SparseConfig:
    return SparseConfig(dim=DIM, init_std=0.3, check_replicas=True, **options)


def make(replicas: int, planner=None, chunk_bytes: int = 0, **options) -> EmbeddingCollection:
    """A sharded collection with `replicas` copies; tiny chunks are set by hand, since the option counts whole MiB."""
    meshes = mesh.build(mesh.MeshSpec(sparse_replica=replicas), "cpu")
    made = shard(SCHEMA, FEATURES, config(**options), "cpu", 3, meshes, planner)
    if chunk_bytes:
        own = made.storage
        shape = (own.pieces_of_shard, sum(p.rows for p in own.pieces_of_shard), DIM, "cpu", own.group, own.semantics)
        made.storage = type(own)(*shape, chunk_bytes, eps=1e-8)
        made.reinitialise(3)
    return made


def copy(state: dict) -> dict:
    return {kind: {name: t.clone() for name, t in tables.items()} for kind, tables in state.items()}


def generations(world: int) -> dict[str, dict]:
    """Name -> arguments of `make` for every generation that fits `world` processes."""
    made = {"v1": {"replicas": 1}, "v1_rows": {"replicas": 1, "planner": all_row_wise}}
    for replicas in {2, world} if world > 1 else ():
        made[f"v2_{replicas}"] = {"replicas": replicas}
        made[f"v3_{replicas}"] = {"replicas": replicas, "fully_shard": True}
        made[f"v3_{replicas}_chunks"] = {"replicas": replicas, "fully_shard": True, "chunk_bytes": 512}
    return made


def trajectories(rank: int, world: int, steps: int) -> dict:
    """Losses, tables and bytes of every generation."""
    found = {}
    for name, arguments in generations(world).items():
        collection = make(**arguments)
        found[name] = (train(collection, rank, world, steps), collection.state_dict(), collection.num_bytes())
    return found
