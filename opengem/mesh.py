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
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opengem.config import MeshSpec
from opengem.errors import NonFiniteError, UserError

# torch 2.11 knows only the second names, later ones warn about them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Mesh:
    """The device meshes of a job; every rank makes them in the same order.

    dense: axes (replica, shard). experts: axes (replica, expert_shard, expert), experts on neighbouring ranks.
    sparse: axes (sparse_shard, sparse_replica), replicas on neighbouring ranks: what replicas exchange (whole shards)
    is more than what shards exchange (the batch's rows), so it goes over the faster links inside a node. ids: the same
    ranks and axes with channels of their own, so that ids of the next batch pass vectors of this one.
    """

    spec: MeshSpec
    dense: DeviceMesh
    experts: DeviceMesh
    sparse: DeviceMesh
    ids: DeviceMesh


def build(spec: MeshSpec, device_type: str) -> Mesh:
    """Make the meshes over the default process group (`start` or torchrun made it). device_type: "cpu" or "cuda"."""
    spec = spec.resolve(dist.get_world_size())
    expert_shard = spec.shard // spec.expert
    tables = ((spec.sparse_shard, spec.sparse_replica), ("sparse_shard", "sparse_replica"))
    return Mesh(
        spec,
        init_device_mesh(device_type, (spec.replica, spec.shard), mesh_dim_names=("replica", "shard")),
        init_device_mesh(
            device_type,
            (spec.replica, expert_shard, spec.expert),
            mesh_dim_names=("replica", "expert_shard", "expert"),
        ),
        init_device_mesh(device_type, tables[0], mesh_dim_names=tables[1]),
        init_device_mesh(device_type, tables[0], mesh_dim_names=tables[1]),
    )


def start(device_type: str, timeout_s: float = 600.0) -> tuple[int, int]:
    """Join the process group torchrun describes, or be a group of one. Returns (rank, number of ranks).

    NCCL on GPUs (rank `LOCAL_RANK` takes that GPU), Gloo on CPUs. A collective that waits longer than `timeout_s`
    is an error.
    """
    options = {"backend": "nccl" if device_type == "cuda" else "gloo", "timeout": timedelta(seconds=timeout_s)}
    if device_type == "cuda":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # what is exchanged under matrix products starts at once
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    if "RANK" in os.environ:
        dist.init_process_group(**options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    return dist.get_rank(), dist.get_world_size()


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[None]:
    """Inside the block this process is one of torchrun's, and an error on one ends all; alone, nothing is done."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    start(device_type)
    with fail_together():
        yield
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_per_node() -> int:
    """Processes on this machine, as torchrun says; all where it says nothing."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place; collective."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_padded(rows: Tensor, room: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows `[n, ...]` of all ranks of the group (None: all processes) in rank order, those of each with zeros up to
    `room`: `[ranks * room, ...]`.

    Differentiable: the gradient of a row is summed over what all ranks made of it. Collective, as is its backward, so
    all run both. Alone, the rows themselves. ValueError where a process has more than `room` rows.
    """
    if (world_size() if group is None else group.size()) == 1:
        return rows
    if rows.shape[0] > room:
        raise ValueError(f"gather_padded: rank {rank()} has {rows.shape[0]} rows, each process has room for {room}")
    padded = torch.cat([rows, rows.new_zeros(room - rows.shape[0], *rows.shape[1:])])
    return _Gather.apply(padded, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        out = rows.new_empty(dist.get_world_size(group) * rows.shape[0], *rows.shape[1:])
        all_gather(out, rows, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        reduce_scatter(own, grad.contiguous(), group=ctx.group)
        return own, None


def max_over_ranks(tensor: Tensor) -> Tensor:
    """The largest over all processes, in place; collective."""
    if world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def sum_gradients(grads: list[Tensor], bucket_bytes: int = 32 << 20) -> None:
    """Sum every gradient over all processes, in place, in buckets that are under way together; collective.

    Every process brings gradients of the same shapes and dtype in the same order.
    """
    if world_size() == 1:
        return
    buckets, room = [], 0
    for grad in grads:
        if grad.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(grad)
        room -= grad.nbytes
    flat = [torch.cat([grad.reshape(-1) for grad in bucket]) for bucket in buckets]
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in flat]:
        work.wait()
    for bucket, summed in zip(buckets, flat, strict=True):
        for grad, part in zip(bucket, summed.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def swap_counts(sent: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """(sent, received) on the host: how much this rank sends to each rank of the group, and gets; collective."""
    if group.size() == 1:
        return (sent.tolist(),) * 2
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent, received = torch.stack([sent, received]).tolist()
    return sent, received


def exchange(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `values[: sent[0]]` to the first rank of the group, the next `sent[1]` to the second, ...; collective.

    In a group of one rank, `values` themselves.
    """
    if group.size() == 1:
        return values
    out = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(out, values.contiguous(), received, sent, group=group)
    return out


def gather_to_first(value: object) -> list | None:
    """What every process gave, in rank order, on rank 0; None elsewhere. Pickled; collective."""
    if world_size() == 1:
        return [value]
    found = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, found)
    return found


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def assert_equal(tensor: Tensor, what: str, group: dist.ProcessGroup | None = None) -> None:
    """RuntimeError unless every rank of the group holds the same bits (compares all of them; for checks)."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    lowest, highest = (tensor.view(integers).to(torch.int32, copy=True) for _ in range(2))
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    wrong = (lowest != highest).flatten().nonzero()
    if wrong.numel():
        row = int(wrong[0]) // (tensor.shape[1] if tensor.dim() > 1 else 1)
        raise RuntimeError(f"replicas differ: {wrong.numel()} values of {what}, first in row {row}")


_KEY = "opengem/failure"
_POLL_S = 0.5
_FAREWELL_S = 5.0  # how long a failing rank stays so that the others can read its message
_AFTER_S = 2.0  # how long the others stay then: the launcher ends all when the first one is gone, which should be it


@contextlib.contextmanager
def fail_together(exit_code: int = 1) -> Iterator[None]:
    """Inside the block an exception on any rank ends every rank within seconds, with that rank's message.

    Without it the other ranks would wait in their next collective until its timeout. The failing rank re-raises; the
    others print the message to standard error and exit with `exit_code` (2 for a UserError, 3 for a NonFiniteError).
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
    code = 2 if isinstance(error, UserError) else 3 if isinstance(error, NonFiniteError) else 0
    with contextlib.suppress(dist.DistError):  # the others may be gone already
        if store.add(_KEY + "/count", 1) == 1:
            store.set(_KEY, f"{code} {dist.get_rank()} {type(error).__name__}: {error}")
        else:
            store.add(_KEY + "/heard", 1)
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
        done.wait(_AFTER_S)
        os._exit(int(code) or exit_code)
