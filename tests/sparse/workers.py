"""What the processes of the distributed tests run, and how they are started."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opengem import checkpoint, mesh
from opengem.config import SparseConfig
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.sparse.collection import EmbeddingCollection
from opengem.sparse.fully_sharded_2d import FullyShardedTables
from opengem.sparse.pipeline import Pipeline
from opengem.sparse.sharded import shard
from opengem.sparse.sharded_2d import Copies
from opengem.sparse.table import Piece

DIM, BATCH, SHORT = 8, 12, 8
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
MIXED = {"items": "column", "tags": "column", "hour": "row"}


def spawn(worker, world: int, *args, seconds: float = 240.0) -> list:
    """Run `worker(rank, world, *args)` in `world` Gloo processes; returns what each of them returned."""
    with tempfile.TemporaryDirectory() as folder:
        # Processes forked from one that has imported torch, and done nothing else, start in no time.
        multiprocessing.set_forkserver_preload(["torch", __name__])
        arguments = (world, folder, worker, args)
        context = mp.start_processes(_enter, arguments, nprocs=world, join=False, start_method="forkserver")
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
    return train(collection, 0, 1, steps), collection.gather()


def config(**options) -> SparseConfig:
    return SparseConfig(dim=DIM, init_std=0.3, check_replicas=True, **options)


@functools.cache
def meshes(replicas: int) -> mesh.Mesh:
    """Shared by all collections of a process: every Gloo group brings threads, and their starts take the time."""
    return mesh.build(mesh.MeshSpec(sparse_replica=replicas), "cpu")


def make(replicas: int, placement=None, chunk_bytes=0, replicas_option="exact", **options) -> EmbeddingCollection:
    """A sharded collection with `replicas` copies; tiny chunks are set by hand, since the option counts whole MiB."""
    options |= {"replicas": replicas_option, "placement": placement or {}}
    made = shard(SCHEMA, FEATURES, config(**options), "cpu", 3, meshes(replicas))
    if chunk_bytes:
        own = made.storage
        shape = (own.pieces_of_shard, sum(p.rows for p in own.pieces_of_shard), DIM, "cpu", own.copies, own.semantics)
        made.storage = type(own)(*shape, "chunks", chunk_bytes, eps=1e-8)
        made.reinitialise(3)
    return made


def copy(state: dict) -> dict:
    return {kind: {name: t.clone() for name, t in tables.items()} for kind, tables in state.items()}


def generations(world: int) -> dict[str, dict]:
    """Name -> arguments of `make` for every generation that fits `world` processes."""
    made = {"v1": {"replicas": 1}, "v1_rows": {"replicas": 1, "placement": dict.fromkeys(ROWS, "row")}}
    made["v1_copied"] = {"replicas": 1, "placement": dict.fromkeys(ROWS, "copy")}
    if DIM % world == 0:
        made["v1_columns"] = {"replicas": 1, "placement": dict.fromkeys(ROWS, "column")}
    for replicas in {2, world} if world > 1 else ():
        if world % replicas:
            continue
        made[f"v2_{replicas}"] = {"replicas": replicas}
        made[f"v3_{replicas}"] = {"replicas": replicas, "fully_shard": True}
        made[f"v3_{replicas}_chunks"] = {"replicas": replicas, "fully_shard": True, "chunk_bytes": 512}
        made[f"v2_{replicas}_copied"] = {"replicas": replicas, "copy_rows": 20}
        made[f"v2_{replicas}_columns"] = {"replicas": replicas, "placement": MIXED}
        made[f"v3_{replicas}_columns"] = {"replicas": replicas, "placement": MIXED, "fully_shard": True}
        made[f"v3_{replicas}_copied"] = {"replicas": replicas, "fully_shard": True, "copy_rows": 6}
    return made


def everything(rank: int, world: int, steps: int, folder: str) -> dict:
    """All checks of one group of processes in one start, since starting them is what takes the time."""
    found = {"trajectories": trajectories(rank, world, steps), "checkpoints": checkpoints(rank, world, folder)}
    found["pipeline"] = pipeline(rank, world)
    found["uneven"] = uneven_batches(rank, world)
    found["empty"] = empty_batch(rank, world)
    if world > 1:
        found["average"] = average(rank, world)
        found["divergence"] = divergence(rank, world)
        found["peak"] = peak(rank, world)
    return found


MAIN = ("v1", "v2_2", "v3_2", "v3_2_chunks")


def trajectories(rank: int, world: int, steps: int, names: tuple[str, ...] = ()) -> dict:
    """Losses, tables and bytes of every generation; all `steps` for the main ones, a few for the others."""
    found = {}
    for name, arguments in generations(world).items():
        if names and name not in names:
            continue
        collection = make(**arguments)
        losses = train(collection, rank, world, steps if name in MAIN or names else min(steps, SHORT))
        found[name] = (losses, collection.gather(), collection.num_bytes())
    return found


def checkpoints(rank: int, world: int, folder: str) -> dict:
    """Load every checkpoint that is in the folder into every generation, then save one of each after two steps."""
    before, loaded = sorted(Path(folder).iterdir()), {}
    names = ("v1", "v1_columns", "v2_2", "v3_2_chunks", "v3_2_columns", "v3_3")
    chosen = {name: arguments for name, arguments in generations(world).items() if name in names}
    for name, arguments in chosen.items():
        for saved in before:
            collection = make(**arguments)
            state = {"embeddings": collection.state_dict()}
            checkpoint.load(checkpoint.find(saved), state)
            collection.load_state_dict(state["embeddings"])
            loaded[f"{saved.name} into {name} on {world}"] = (
                collection.gather(),
                train(collection, rank, world, 1, first=2),
            )
    if world > 1:
        dist.barrier()
    for name, arguments in chosen.items():
        collection = make(**arguments)
        train(collection, rank, world, 2)
        checkpoint.save(Path(folder) / f"{name} on {world}", 1, {"embeddings": collection.state_dict()}, keep=1)
    if world > 1:
        dist.barrier()
    return loaded


def pipeline(rank: int, world: int) -> dict[str, bool]:
    """Whether the pipelined loop gives the bits of the plain one, for two passes; name of generation -> answer."""
    found = {}
    for name, arguments in generations(world).items():
        if name in ("v1", "v2_2_columns", "v3_2", "v3_2_chunks", "v3_2_copied"):
            plain, piped = make(**arguments), make(**arguments)
            same = [_piped(piped, rank, world, train(plain, rank, world, 4)) for _ in range(2)]
            after = zip(piped.gather()["weight"].values(), plain.gather()["weight"].values(), strict=True)
            found[name] = all(same) and all(torch.equal(*pair) for pair in after)
    return found


def _piped(collection: EmbeddingCollection, rank: int, world: int, losses: list[float]) -> bool:
    """Whether a pass through the pipeline has these losses. Called in all the ways that it may be."""
    batches, same = [part(random_batch(step), rank, world, step) for step in range(len(losses))], True
    pipe = Pipeline(batches, collection)
    for step, (batch, ids) in enumerate(pipe):
        if step == 2:
            pipe.ahead()
        embedded = collection.lookup(ids)
        if step % 2:
            pipe.ahead()
        loss = loss_of(batch, embedded)
        loss.backward()
        collection.step(0.05)
        total = loss.detach().clone()
        dist.all_reduce(total)
        same &= float(total) == losses[step]
    return same


def uneven_batches(rank: int, world: int) -> str:
    """Rank 0 ends after two batches, the others after three: what each rank is told."""
    batches = [part(random_batch(step), rank, world, step) for step in range(2 if rank == 0 else 3)]
    collection, done = make(1), 0
    try:
        for batch, ids in Pipeline(batches, collection):
            loss_of(batch, collection.lookup(ids)).backward()
            collection.step(0.05)
            done += 1
    except RuntimeError as error:
        return f"{done}: {error}"
    return f"{done}"


def empty_batch(rank: int, world: int) -> bool:
    """Whether a step on a batch without any sample, on all processes, changes no row in any generation."""
    same = True
    for arguments in generations(world).values():
        collection = make(**arguments)
        before = collection.gather()
        batch = random_batch(0, size=0)
        loss_of(batch, collection(batch)).backward()
        assert bool(collection.finite())
        collection.step(0.05)
        after = collection.gather()
        for kind in ("weight", "moment"):
            same &= all(torch.equal(before[kind][name], after[kind][name]) for name in ROWS)
    return same


def average(rank: int, world: int) -> dict:
    """Averaging V2 and V3, and the same by hand: every copy steps alone, then the mean of all."""
    kinds = {"v2": {}, "v3": {"fully_shard": True}, "v3_chunks": {"fully_shard": True, "chunk_bytes": 512}}
    found = {}
    for name, options in kinds.items():
        collection = make(world, replicas_option="average", **options)
        train(collection, rank, world, 3)
        found[name] = collection.gather()
    alone = EmbeddingCollection(SCHEMA, FEATURES, config(), "cpu", seed=3)
    mean = copy(alone.state_dict())
    for step in range(3):
        states = []
        for r in range(world):
            alone.load_state_dict(mean)
            batch = part(random_batch(step), r, world, step)
            loss_of(batch, alone(batch)).backward()
            alone.step(0.05)
            states.append(copy(alone.state_dict()))
        mean = {
            kind: {name: sum(s[kind][name] for s in states) / world for name in tables} for kind, tables in mean.items()
        }
    return {"by hand": mean, **found}


def too_few_columns(rank: int, world: int) -> str:
    """What a rank is told when 8 columns are to be cut in 3."""
    try:
        make(1, placement={"items": "column"})
    except UserError as error:
        return str(error)
    return ""


def divergence(rank: int, world: int) -> str:
    """What the check of the copies says after one bit of one of them has changed."""
    collection = make(world)
    collection.storage.assert_equal()
    if rank == world - 1:
        collection.storage.weight[7, 3] += 1e-6
    try:
        collection.storage.assert_equal()
    except RuntimeError as error:
        return str(error)
    return ""


class LiveBytes(TorchDispatchMode):
    """Largest number of bytes of tensors made inside the block that lived at one time."""

    def __init__(self, persistent: torch.Tensor) -> None:
        super().__init__()
        self.live, self.most, self.known = 0, 0, {persistent.untyped_storage()._cdata}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key = storage._cdata
        if key in self.known or not storage.nbytes():
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.most = max(self.most, self.live)

        def gone() -> None:
            self.known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def peak(rank: int, world: int) -> tuple[int, int, int, int]:
    """With a table of 20,000 rows: (bytes of a whole shard, chunk_bytes, most bytes alive in a lookup of 10 rows, bytes
    that reading the 10 rows ahead leaves)."""
    chunk, made = 64 << 10, meshes(world)
    copies = Copies(*(axes.get_group("sparse_replica") for axes in (made.sparse, made.ids)))
    tables = FullyShardedTables([Piece("t", 0, 20_000, 0)], 20_000, DIM, "cpu", copies, "exact", "chunks", chunk, eps=0)
    rows = torch.arange(10) * 1999
    with LiveBytes(tables.weight) as bytes_alive:
        found = tables.lookup(tables.request(rows, learn=False), torch.float32)
    assert found.shape == (10, DIM)
    request = tables.request(rows, learn=True)
    with LiveBytes(tables.weight) as left:
        request = tables.read_ahead(request, torch.float32, [request])
        time.sleep(0.1)  # Gloo's thread may keep a finished chunk for a moment
    assert torch.equal(tables.lookup(request, torch.float32), found)
    return 20_000 * DIM * 4, chunk, bytes_alive.most, left.live
