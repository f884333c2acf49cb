"""The processes of a job and the axes they are arranged on; and how an error on one of them ends all.

Dense parameters: `replica` x `shard` ranks (copies of the model, each split over `shard` ranks). Experts reuse the
ranks of a shard group: `expert` ranks inside it hold different experts, the other `shard / expert` split each expert.
Embedding tables: `sparse_replica` x `sparse_shard` ranks (copies of all tables, each split over `sparse_shard` ranks).
An axis of degree 1 is an axis like any other, so code for one process and for many is the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opengem.errors import UserError

# torch 2.11 knows only the second names, later ones warn about them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class MeshSpec:
    """Degrees of each axis; `shard` and `sparse_shard` of 0 take the ranks that are left."""

    replica: int = 1
    """copies of the dense model"""
    shard: int = 0
    """ranks that share one copy of the dense model (0: all that are left)"""
    expert: int = 1
    """ranks inside a shard group that hold different experts; divides shard"""
    sparse_replica: int = 1
    """copies of the embedding tables"""
    sparse_shard: int = 0
    """ranks that share one copy of the tables (0: all that are left)"""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low = getattr(self, item.name), 0 if item.name.endswith("shard") else 1
            if not isinstance(value, int) or value < low:
                raise UserError(f"mesh {item.name} = {value!r}: must be a whole number, at least {low}")

    def resolve(self, world_size: int) -> MeshSpec:
        """The same spec with every degree set. UserError names the product, the world size and the legal choices."""
        shard = _rest(world_size, "replica", self.replica, "shard", self.shard)
        sparse_shard = _rest(world_size, "sparse_replica", self.sparse_replica, "sparse_shard", self.sparse_shard)
        if shard % self.expert:
            choices = ", ".join(map(str, _divisors(shard)))
            raise UserError(f"mesh expert = {self.expert} does not divide shard = {shard}; legal: {choices}")
        return replace(self, shard=shard, sparse_shard=sparse_shard)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _rest(world_size: int, outer: str, degree: int, inner: str, inner_degree: int) -> int:
    rest = inner_degree or max(world_size // degree, 1)
    if degree * rest != world_size:
        choices = ", ".join(f"{d} x {world_size // d}" for d in _divisors(world_size))
        raise UserError(
            f"mesh {outer} {degree} x {inner} {rest} = {degree * rest} ranks, but the job has {world_size}; "
            f"legal {outer} x {inner}: {choices}"
        )
    return rest


@dataclass(frozen=True)
class Mesh:
    """The device meshes of a job; every rank makes them in the same order.

    dense: axes (replica, shard). experts: axes (replica, expert_shard, expert), experts on neighbouring ranks.
    sparse: axes (sparse_shard, sparse_replica), replicas on neighbouring ranks: what replicas exchange (whole shards)
    is more than what shards exchange (the batch's rows), so it goes over the faster links inside a node.
    """

    spec: MeshSpec
    dense: DeviceMesh
    experts: DeviceMesh
    sparse: DeviceMesh


def build(spec: MeshSpec, device_type: str) -> Mesh:
    """Make the meshes over the default process group (`start` or torchrun made it). device_type: "cpu" or "cuda"."""
    spec = spec.resolve(dist.get_world_size())
    expert_shard = spec.shard // spec.expert
    return Mesh(
        spec,
        init_device_mesh(device_type, (spec.replica, spec.shard), mesh_dim_names=("replica", "shard")),
        init_device_mesh(
            device_type,
            (spec.replica, expert_shard, spec.expert),
            mesh_dim_names=("replica", "expert_shard", "expert"),
        ),
        init_device_mesh(
            device_type,
            (spec.sparse_shard, spec.sparse_replica),
            mesh_dim_names=("sparse_shard", "sparse_replica"),
        ),
    )


def start(device_type: str, timeout_s: float = 600.0) -> tuple[int, int]:
    """Join the process group torchrun describes, or be a group of one. Returns (rank, number of ranks).

    NCCL on GPUs (rank `LOCAL_RANK` takes that GPU), Gloo on CPUs. A collective that waits longer than `timeout_s`
    is an error.
    """
    import torch

    options = {"backend": "nccl" if device_type == "cuda" else "gloo", "timeout": timedelta(seconds=timeout_s)}
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    if "RANK" in os.environ:
        dist.init_process_group(**options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    return dist.get_rank(), dist.get_world_size()


_KEY = "opengem/failure"
_POLL_S = 0.5
_FAREWELL_S = 5.0  # how long a failing rank stays so that the others can read its message


@contextlib.contextmanager
def fail_together(exit_code: int = 1) -> Iterator[None]:
    """Inside the block an exception on any rank ends every rank within seconds, with that rank's message.

    Without it the other ranks would wait in their next collective until its timeout. The failing rank re-raises; the
    others print the message to standard error and exit with `exit_code` (2 for a UserError).
    """
    if dist.get_world_size() == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store().clone()  # its own connection: the main one may be blocked
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(store, done, exit_code), daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        done.set()
        watch.join()
        _announce(error)
        raise
    finally:
        done.set()
        watch.join()


def _announce(error: BaseException) -> None:
    """Tell the other ranks, and wait until they have heard (they need this rank's store when it is rank 0)."""
    store = dist.distributed_c10d._get_default_store().clone()
    code = 2 if isinstance(error, UserError) else 0
    with contextlib.suppress(dist.DistError):  # the others may be gone already
        if store.add(_KEY + "/count", 1) == 1:
            store.set(_KEY, f"{code} {dist.get_rank()} {type(error).__name__}: {error}")
        until = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until and store.add(_KEY + "/heard", 0) < dist.get_world_size() - 1:
            time.sleep(_POLL_S / 5)


def _watch(store: dist.Store, done: threading.Event, exit_code: int) -> None:
    while not done.wait(_POLL_S):
        try:
            if not store.check([_KEY]):
                continue
            code, rank, message = store.get(_KEY).decode().split(" ", 2)
            store.add(_KEY + "/heard", 1)
        except dist.DistError:
            code, rank, message = "0", "0", "the rank that keeps the store is gone"
        os.write(2, f"rank {dist.get_rank()} stops because rank {rank} failed: {message}\n".encode())
        os._exit(int(code) or exit_code)
