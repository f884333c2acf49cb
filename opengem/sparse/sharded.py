"""Embedding tables over many processes, first generation (V1): each row on one rank, ids and vectors by all-to-all.

    collection = shard(schema, features, config, device, seed, mesh)     # same interface as EmbeddingCollection

A collection is routing over the mesh's `sparse_shard` axis (here) times storage over its `sparse_replica` axis:
`Tables` alone is V1, `sharded_2d.ReplicatedTables` V2, `fully_sharded_2d.FullyShardedTables` V3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.config import SparseConfig
from opengem.data.schema import Feature, Schema
from opengem.errors import UserError
from opengem.kernels.jagged_ops.op import gather_rows
from opengem.mesh import Mesh, all_gather, exchange, max_over_ranks, ranks_per_node, swap_counts
from opengem.sparse.collection import (
    EmbeddingCollection,
    LocalRouter,
    Route,
    pieces_of,
    row_dtype,
    slots_of,
    table_rows,
)
from opengem.sparse.fully_sharded_2d import FullyShardedTables
from opengem.sparse.joined import JoinedCollections
from opengem.sparse.plan import Plan, plan
from opengem.sparse.sharded_2d import Copies, ReplicatedTables, gather_uneven
from opengem.sparse.table import Columns, Duplicates, Piece, Tables


def shard(
    schema: Schema, features: list[Feature], config: SparseConfig, device: torch.device | str, seed: int, mesh: Mesh,
) -> EmbeddingCollection | JoinedCollections:
    """The collection of `mesh.sparse`: V1 when sparse_replica is 1, else V2, or V3 with `config.fully_shard`.

    Collective: every rank calls it with equal arguments.
    """
    slots = slots_of(schema, features, config.max_rows)
    rows = table_rows(slots)
    group, id_group = (axes.get_group("sparse_shard") for axes in (mesh.sparse, mesh.ids))
    copies = Copies(*(axes.get_group("sparse_replica") for axes in (mesh.sparse, mesh.ids)))
    row_bytes = config.dim * row_dtype(config).itemsize + 4
    load = {name: float(sum(slot.table == name for slot in slots)) for name in rows}
    local = int(max_over_ranks(torch.tensor(ranks_per_node(), device=device)))  # nodes may differ, plans may not
    node = _in_a_node(group.size(), copies.group.size(), local)
    made = plan(
        rows, group.size(), row_bytes=row_bytes, load=load, ranks_per_node=node, placement=config.placement,
        copy_rows=config.copy_rows,
    )  # fmt: skip
    numbers = {piece.table: piece.at for piece in pieces_of(rows)}
    options = {"eps": config.eps, "dtype": row_dtype(config), "numbers": numbers}
    arguments, parts = (schema, features, config, device, seed), []
    copied, columns = (
        {name: n for name, n in rows.items() if made.placement[name] == kind} for kind in ("copy", "column")
    )
    sharded = {name: n for name, n in rows.items() if name not in copied | columns}
    if sharded:
        router = AllToAllRouter(sharded, made, group, id_group, device)
        storage = _storage(list(made.pieces[group.rank()]), config.dim, config, device, copies, options)
        parts.append(EmbeddingCollection(*arguments, router, storage, sharded))
    if columns:
        width, cut = config.dim // group.size(), options | {"columns": columns_of(config.dim, group)}
        storage = _storage(pieces_of(columns), width, config, device, copies, cut)
        parts.append(EmbeddingCollection(*arguments, ColumnRouter(group, id_group), storage, columns))
    if copied:
        everyone, shape = Copies(dist.group.WORLD, dist.new_group()), (sum(copied.values()), config.dim, device)
        storage = ReplicatedTables(pieces_of(copied), *shape, everyone, "exact", **options)
        parts.append(EmbeddingCollection(*arguments, CopyRouter(), storage, copied))
    collection = parts[0] if len(parts) == 1 else JoinedCollections(parts)
    collection.plan = made
    return collection


def _in_a_node(ranks: int, copies: int, local: int) -> int:
    """Of the ranks of a shard group, those of one node (0: all, or they do not fill whole nodes); copies are
    neighbours."""
    inside = max(local // copies, 1)
    return inside if ranks % inside == 0 else 0


def _storage(
    pieces: list[Piece], dim: int, config: SparseConfig, device: torch.device | str, copies: Copies, options: dict
) -> Tables:
    """Where this rank keeps `pieces` of its shard group, in one of the three generations."""
    shape = (pieces, sum(piece.rows for piece in pieces), dim, device)
    if config.fully_shard:
        chunk_bytes = config.chunk_mb << 20
        return FullyShardedTables(*shape, copies, config.replicas, config.reads, chunk_bytes, **options)
    if copies.group.size() > 1:
        return ReplicatedTables(*shape, copies, config.replicas, **options)
    return Tables(*shape, **options)


class Everywhere:
    """What all processes of the job do together, however ids are routed."""

    def agree(self, flag: Tensor) -> Tensor:
        """0-dim bool: whether `flag` holds on all."""
        votes = flag.to(torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return votes.bool()

    def gather(self, own: Tensor) -> Tensor:
        """The sum over all, of rows that one of them has and the others hold as 0: exact."""
        whole = own.float()
        dist.all_reduce(whole)
        return whole.to(own.dtype)


class CopyRouter(Everywhere, LocalRouter):
    """For tables of which every process holds a copy: no id or vector travels (gradients do in the storage)."""


@dataclass(frozen=True)
class RemoteRoute(Route):
    """ids: the ids of this rank. sent, received: distinct rows by rank, host ints."""

    ids: Duplicates
    sent: list[int]
    received: list[int]


class AllToAllRouter(Everywhere):
    """Sends each distinct row number to the rank that keeps it; vectors and gradients travel the same way.

    Every method is collective over `group` (ids: `id_group`, the same ranks); a rank without ids takes part with empty
    messages.
    """

    def __init__(
        self, rows: dict[str, int], made: Plan, group: dist.ProcessGroup, id_group: dist.ProcessGroup,
        device: torch.device | str) -> None:
        self.group, self.id_group, self.ranks = group, id_group, group.size()
        self.rows_a_rank = max([made.rows(rank) for rank in range(self.ranks)] + [1])
        begin = {piece.table: piece.at for piece in pieces_of(rows)}
        runs = sorted(
            (begin[piece.table] + piece.first, rank * self.rows_a_rank + piece.at)
            for rank, pieces in enumerate(made.pieces)
            for piece in pieces
            if piece.rows
        )
        starts, places = zip(*runs, strict=True) if runs else ((0,), (0,))
        self.starts = torch.tensor(starts, device=device)
        self.shifts = torch.tensor(places, device=device) - self.starts
        self.edges = torch.arange(self.ranks + 1, device=device) * self.rows_a_rank

    def send_ids(self, rows: Tensor) -> RemoteRoute:
        """rows: int64 `[N]` in the numbering of all tables -> the rows that were asked of this rank."""
        places = rows + self.shifts[torch.searchsorted(self.starts, rows, right=True) - 1]
        ids = Duplicates.of(places)
        sent, received = swap_counts(torch.searchsorted(ids.distinct, self.edges).diff(), self.id_group)
        asked = exchange(ids.distinct % self.rows_a_rank, sent, received, self.id_group)
        return RemoteRoute(asked, ids, sent, received)

    def vectors(self, route: RemoteRoute, found: Tensor) -> Tensor:
        found = exchange(found, route.received, route.sent, self.group)
        return gather_rows(found, route.ids.inverse)

    def grads(self, route: RemoteRoute, grads: Tensor) -> Tensor:
        return exchange(route.ids.sum(grads), route.sent, route.received, self.group)


@dataclass(frozen=True)
class ColumnRoute(Route):
    """ids: the ids of this rank. counts: how many distinct ones each rank has, host ints; `rows` are those of all."""

    ids: Duplicates
    counts: list[int]


class ColumnRouter(Everywhere):
    """For tables of which every rank of the group keeps some columns: each distinct row number goes to all ranks, parts
    of vectors and gradients to and fro.

    However hot a row is, its bytes come from all ranks alike; the price is that every id goes to every rank.
    """

    def __init__(self, group: dist.ProcessGroup, id_group: dist.ProcessGroup) -> None:
        self.group, self.id_group = group, id_group

    def send_ids(self, rows: Tensor) -> ColumnRoute:
        ids = Duplicates.of(rows)
        counts = rows.new_empty(self.id_group.size())
        all_gather(counts, rows.new_tensor([ids.distinct.shape[0]]), group=self.id_group)
        counts = counts.tolist()
        return ColumnRoute(gather_uneven(ids.distinct, counts, self.id_group), ids, counts)

    def vectors(self, route: ColumnRoute, found: Tensor) -> Tensor:
        """found: `[M, dim / ranks]`, these columns of the rows that any rank asked for."""
        ranks, own = len(route.counts), route.ids.distinct.shape[0]
        parts = exchange(found, route.counts, [own] * ranks, self.group)
        whole = parts.view(ranks, own, found.shape[1]).transpose(0, 1).reshape(own, ranks * found.shape[1])
        return gather_rows(whole, route.ids.inverse)

    def grads(self, route: ColumnRoute, grads: Tensor) -> Tensor:
        ranks, own = len(route.counts), route.ids.distinct.shape[0]
        width = grads.shape[1] // ranks
        parts = route.ids.sum(grads).view(own, ranks, width).transpose(0, 1).reshape(ranks * own, width)
        return exchange(parts, [own] * ranks, route.counts, self.group)


def columns_of(dim: int, group: dist.ProcessGroup) -> Columns:
    """The part of this rank, when the ranks of the group share rows of width `dim` evenly."""
    ranks = group.size()
    if dim % ranks:
        raise UserError(
            f"plan: {dim} columns (sparse.dim) cannot be shared evenly by {ranks} ranks; place the tables otherwise, "
            f"or choose a sparse.dim that is a multiple of {ranks}"
        )
    return Columns(dim // ranks * group.rank(), dim, group)
