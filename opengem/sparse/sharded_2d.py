"""Second generation (V2): each shard has `sparse_replica` copies, kept bitwise equal after every step.

All-to-alls stay inside one shard group, so they do not grow with the job. The price is memory: every copy is whole.
Two-dimensional sparse parallelism is described in arXiv 2508.03854.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.mesh import all_gather, assert_equal, gather_padded
from opengem.sparse.table import Duplicates, Piece, Request, Tables


@dataclass(frozen=True)
class Copies:
    """The ranks that hold the same rows: a group for vectors and gradients, and one of the same ranks for ids."""

    group: dist.ProcessGroup
    id_group: dist.ProcessGroup


@dataclass(frozen=True)
class CopyRequest:
    """own: what this copy asked for. distinct: the duplicates in it. counts: distinct rows of each copy, host ints.

    joined: the distinct rows of all copies, one copy after the other.
    """

    own: Request
    distinct: Duplicates | None = None
    counts: list[int] | None = None
    joined: Request | None = None


class ReplicatedTables(Tables):
    """`Tables` of which every rank of `copies` holds a copy.

    semantics "exact": gradients of a row are summed over the copies and applied to each, as one process with the
    joined batch would. "average": each copy applies its own gradients, then rows and state are averaged; a row that
    only one copy saw moves 1 / copies as far. Averaging moves whole shards, exact only the touched rows.
    """

    def __init__(
        self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, copies: Copies, semantics: str,
        **options) -> None:
        super().__init__(pieces, rows, dim, device, **options)
        self.copies, self.semantics = copies, semantics

    def request(self, rows: Tensor, learn: bool) -> CopyRequest:
        """As `Tables.request`; collective: every copy asks for its own rows."""
        if not learn or self.semantics == "average":
            return CopyRequest(super().request(rows, learn))
        distinct = Duplicates.of(rows)
        counts = rows.new_empty(self.copies.id_group.size())
        all_gather(counts, rows.new_tensor([distinct.distinct.shape[0]]), group=self.copies.id_group)
        counts = counts.tolist()
        joined = gather_uneven(distinct.distinct, counts, self.copies.id_group)
        return CopyRequest(Request(rows, None), distinct, counts, super().request(joined, learn))

    def lookup(self, request: CopyRequest, dtype: torch.dtype) -> Tensor:
        return super().lookup(request.own, dtype)

    def update(self, arrived: list[tuple[CopyRequest, Tensor]], lr: float) -> None:
        """`Tables.update` over the rows and gradients of all copies; collective."""
        if self.semantics == "average":
            super().update([(request.own, grads) for request, grads in arrived], lr)
            for tensor in (self.weight, self.moment):
                average(tensor, self.copies.group)
            return
        joined = [
            (request.joined, gather_uneven(request.distinct.sum(grads), request.counts, self.copies.group))
            for request, grads in arrived
        ]
        super().update(joined, lr)

    def first_copy(self) -> bool:
        return self.copies.group.rank() == 0

    def assert_equal(self) -> None:
        assert_equal(self.weight, "the tables", self.copies.group)
        assert_equal(self.moment, "the tables' moments", self.copies.group)


def average(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The mean over the group, in place; 16-bit rows are summed in float32."""
    total = tensor.float() if tensor.dtype != torch.float32 else tensor
    dist.all_reduce(total, group=group)
    tensor.copy_(total / group.size())


def gather_uneven(own: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """The values of every rank of the group, in rank order; `counts[r]` of rank r, also none."""
    longest = max(counts)
    out = gather_padded(own, longest, group)
    parts = out.unflatten(0, (group.size(), longest)) if longest else [out] * group.size()
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
