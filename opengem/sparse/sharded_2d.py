"""Second generation (V2): each shard has `sparse_replica` copies, kept bitwise equal after every step.

All-to-alls stay inside one shard group, so they do not grow with the job. The price is memory: every copy is whole.
Two-dimensional sparse parallelism is described in arXiv 2508.03854.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.mesh import all_gather, assert_equal
from opengem.sparse.table import Piece, Tables, sum_duplicates


class ReplicatedTables(Tables):
    """`Tables` of which every rank of `group` holds a copy.

    semantics "exact": gradients of a row are summed over the copies and applied to each, as one process with the
    joined batch would. "average": each copy applies its own gradients, then rows and state are averaged; a row that
    only one copy saw moves 1 / copies as far. Averaging moves whole shards, exact only the touched rows.
    """

    def __init__(
        self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, group: dist.ProcessGroup,
        semantics: str, **options) -> None:
        super().__init__(pieces, rows, dim, device, **options)
        self.group, self.semantics = group, semantics

    def update(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """`Tables.update` over the rows and gradients of all copies; collective over the group."""
        if self.semantics == "average":
            super().update(rows, grads, lr)
            for tensor in (self.weight, self.moment):
                average(tensor, self.group)
        else:
            super().update(*gather_rows(*sum_duplicates(rows, grads), self.group), lr)

    def first_copy(self) -> bool:
        return self.group.rank() == 0

    def assert_equal(self) -> None:
        assert_equal(self.weight, "the tables", self.group)
        assert_equal(self.moment, "the tables' moments", self.group)


def average(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The mean over the group, in place; 16-bit rows are summed in float32."""
    total = tensor.float() if tensor.dtype != torch.float32 else tensor
    dist.all_reduce(total, group=group)
    tensor.copy_(total / group.size())


def gather_rows(rows: Tensor, grads: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(rows, gradients) of every rank of the group, in rank order. Ranks may bring different numbers, also none."""
    counts = rows.new_empty(group.size())
    all_gather(counts, rows.new_tensor([rows.shape[0]]), group=group)
    counts = counts.tolist()
    longest = max(counts)

    def gather(own: Tensor) -> Tensor:
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: own.shape[0]] = own
        out = own.new_empty(group.size() * longest, *own.shape[1:])
        all_gather(out, padded, group=group)
        parts = out.unflatten(0, (group.size(), longest)) if longest else [out] * group.size()
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return gather(rows), gather(grads)
