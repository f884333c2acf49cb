"""Third generation (V3): the copies of V2 share one set of rows and state, and gather what a lookup needs.

Persistent memory is that of one copy over all ranks: V2's divided by the number of copies. A lookup reads either the
rows it needs ("rows": each distinct row travels once from the rank that stores it) or the whole shard ("chunks": an
all-gather in chunks of whole rows, one in use while the next is under way, so that at most `chunk_bytes` is gathered at
a time). The exact update needs no gather at all: row gradients go to the rank that stores the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.kernels.jagged_ops.op import gather_rows
from opengem.mesh import all_gather, exchange, reduce_scatter, swap_counts
from opengem.sparse.sharded_2d import Copies
from opengem.sparse.table import Duplicates, Piece, Request, Tables


@dataclass(frozen=True)
class SharedRequest:
    """rows: int64 `[N]` in the shard's numbering. chunks: for each chunk its first row and which of `rows` lie in it.

    wanted: the duplicates in `rows`, distinct ones sorted by the rank that stores them; that rank gets `sent[rank]` of
    them. asked: the rows stored here that each rank wants, `received[rank]` of them.
    """

    rows: Tensor
    chunks: list[tuple[int, Tensor]] | None = None
    wanted: Duplicates | None = None
    sent: list[int] | None = None
    received: list[int] | None = None
    asked: Request | None = None


class FullyShardedTables:
    """Rows of one shard, split evenly over the ranks of `copies` (those of V2). Methods as `Tables`, collective.

    The shard's rows are cut into chunks; rank m of M keeps the m-th part of each chunk, so that a chunk is one
    all-gather. own: this rank's rows and state. semantics: as in `ReplicatedTables`. reads: "rows" or "chunks".
    chunk_bytes: most bytes of rows gathered at a time (two half-size chunks: one in use, one under way).
    """

    def __init__(
        self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, copies: Copies,
        semantics: str, reads: str, chunk_bytes: int, *, eps: float, dtype: torch.dtype = torch.float32,
        numbers: dict[str, int] | None = None) -> None:
        self.numbers = numbers or {piece.table: piece.at - piece.first for piece in pieces}
        group = copies.group
        self.copies, self.semantics, self.reads, self.pieces_of_shard = copies, semantics, reads, list(pieces)
        ranks, limit = group.size(), max(chunk_bytes // (2 * dim * dtype.itemsize), group.size())
        self.chunks = max(-(-rows // limit), 1)
        self.span = -(-rows // (self.chunks * ranks))
        self.chunk_rows = self.span * ranks
        mine = []
        for chunk in range(self.chunks):
            first = chunk * self.chunk_rows + group.rank() * self.span
            mine += [piece.cut(first, first + self.span, chunk * self.span) for piece in pieces]
        mine = [piece for piece in mine if piece is not None]
        self.own = Tables(
            mine, self.chunks * self.span, dim, device, eps=eps, dtype=dtype, numbers=self.numbers
        )

    @property
    def pieces(self) -> list[Piece]:
        return self.own.pieces

    @property
    def weight(self) -> Tensor:
        return self.own.weight

    @property
    def moment(self) -> Tensor:
        return self.own.moment

    @property
    def updates(self) -> int:
        return self.own.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.own.updates = value

    def initialise(self, std: float, seed: int) -> None:
        self.own.initialise(std, seed)

    def request(self, rows: Tensor, learn: bool) -> SharedRequest:
        """As `Tables.request`, with rows in the shard's numbering; the ids go to the ranks that store the rows."""
        chunks = list(self._by_chunk(rows)) if self.reads == "chunks" else None
        if chunks is not None and (not learn or self.semantics == "average"):
            return SharedRequest(rows, chunks)
        within, height = rows % max(self.chunk_rows, 1), self.own.weight.shape[0]
        stored = rows // max(self.chunk_rows, 1) * self.span + within % max(self.span, 1)
        wanted = Duplicates.of(within // max(self.span, 1) * height + stored)
        edges = torch.arange(self.copies.id_group.size() + 1, device=rows.device) * height
        sent, received = swap_counts(torch.searchsorted(wanted.distinct, edges).diff(), self.copies.id_group)
        asked = exchange(wanted.distinct % max(height, 1), sent, received, self.copies.id_group)
        return SharedRequest(rows, chunks, wanted, sent, received, self.own.request(asked, learn))

    def lookup(self, request: SharedRequest, dtype: torch.dtype) -> Tensor:
        """`dtype` `[N, dim]`: the rows of the request."""
        if request.chunks is not None:
            return self._read_chunks(request, dtype)
        found = self.own.lookup(request.asked, dtype)
        found = exchange(found, request.received, request.sent, self.copies.group)
        return gather_rows(found, request.wanted.inverse)

    def _read_chunks(self, request: SharedRequest, dtype: torch.dtype) -> Tensor:
        """Gather every chunk once, used or not."""
        rows = request.rows
        out = rows.new_empty(rows.shape[0], self.own.dim, dtype=dtype)
        for (first, where), whole in zip(request.chunks, self._gathered([self.weight]), strict=True):
            found = whole[0].index_select(0, rows.index_select(0, where) - first)
            out.index_copy_(0, where, found.to(dtype))
        return out

    def update(self, arrived: list[tuple[SharedRequest, Tensor]], lr: float) -> None:
        """As `ReplicatedTables.update`."""
        if self.semantics == "average":
            rows = Duplicates.of(torch.cat([request.rows for request, _ in arrived]))
            self._update_average(rows.distinct, rows.sum(torch.cat([grads for _, grads in arrived])), lr)
            return
        own = [
            (request.asked, exchange(request.wanted.sum(grads), request.sent, request.received, self.copies.group))
            for request, grads in arrived
        ]
        self.own.update(own, lr)

    def _update_average(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """Gather each chunk, update it with this rank's gradients, and keep the mean over ranks of this rank's part."""
        chunks = zip(self._by_chunk(rows), self._gathered([self.weight, self.moment]), strict=True)
        for chunk, ((first, where), whole) in enumerate(chunks):
            self._update_chunk(chunk, whole, rows.index_select(0, where) - first, grads.index_select(0, where), lr)
        self.own.updates += 1

    def _update_chunk(self, chunk: int, whole: list[Tensor], rows: Tensor, grads: Tensor, lr: float) -> None:
        first, own = chunk * self.chunk_rows, self.own
        pieces = [piece.cut(first, first + self.chunk_rows, 0) for piece in self.pieces_of_shard]
        options = {"eps": own.eps, "dtype": own.weight.dtype, "numbers": self.numbers}
        copy = Tables([p for p in pieces if p], 0, own.dim, rows.device, **options)
        copy.weight, copy.moment = whole
        copy.updates = own.updates
        copy.update([(copy.request(rows, learn=True), grads)], lr)
        for stored, updated in zip((own.weight, own.moment), whole, strict=True):
            part = stored.narrow(0, chunk * self.span, self.span)
            mean = torch.empty_like(part, dtype=torch.float32)
            reduce_scatter(mean, updated.float(), group=self.copies.group)
            part.copy_(mean / self.copies.group.size())

    def _by_chunk(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """For each chunk its first row and which of `rows` lie in it (int64 positions)."""
        chunk = rows // max(self.chunk_rows, 1)
        order = chunk.argsort(stable=True)
        if self.chunks == 1:
            yield 0, order
            return
        counts = torch.bincount(chunk, minlength=self.chunks).tolist()
        for number, where in enumerate(order.split(counts)):
            yield number * self.chunk_rows, where

    def _gathered(self, stored: list[Tensor]) -> Iterator[list[Tensor]]:
        """The chunks of some of this rank's tensors, whole; the next one is under way while one is in use."""

        def start(chunk: int) -> list[tuple[Tensor, dist.Work]]:
            begun = []
            for tensor in stored:
                part = tensor.narrow(0, chunk * self.span, self.span)
                whole = part.new_empty(self.chunk_rows, *part.shape[1:])
                begun.append((whole, all_gather(whole, part, group=self.copies.group, async_op=True)))
            return begun

        ahead = start(0)
        for chunk in range(self.chunks):
            for _, work in ahead:
                work.wait()
            ready = [whole for whole, _ in ahead]
            ahead = start(chunk + 1) if chunk + 1 < self.chunks else []
            yield ready
            ready.clear()  # or the consumer's name for it would keep this chunk while a third one is made

    def num_bytes(self) -> int:
        return self.own.num_bytes()

    def first_copy(self) -> bool:
        return True

    def assert_equal(self) -> None:
        """There are no copies: each row is stored once."""
