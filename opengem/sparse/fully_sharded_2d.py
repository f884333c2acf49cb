"""Third generation (V3): the copies of V2 share one set of rows and state, and gather what a lookup needs.

Persistent memory is that of one copy over all ranks: V2's divided by the number of copies. A lookup reads either the
rows it needs ("rows": each distinct row travels once from the rank that stores it) or the whole shard ("chunks": an
all-gather in chunks of whole rows, one in use while the next is under way, so that at most `chunk_bytes` is gathered at
a time). The exact update needs no gather at all: row gradients go to the rank that stores the row.

Rows may be read ahead, under the dense work of the batch before, though its update is yet to come: who stores a row
knows which ones that update changes, and only those are read again after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.kernels.jagged_ops.op import gather_rows
from opengem.mesh import all_gather, exchange, reduce_scatter, swap_counts
from opengem.sparse.sharded_2d import Copies
from opengem.sparse.table import Columns, Duplicates, Piece, Request, Tables


@dataclass(frozen=True)
class Ahead:
    """Rows that were read before an update. found: `[U, D]`. stale: int64, which of them it changes, `sent[rank]` of
    each rank that stores them. asked: int64 rows stored here that are stale elsewhere, `received[rank]` of each.
    """

    found: Tensor
    stale: Tensor
    sent: list[int]
    asked: Tensor
    received: list[int]


@dataclass(frozen=True)
class SharedRequest:
    """wanted: the duplicates in the rows of a request, U distinct ones sorted by the rank that stores them,
    `sent[rank]` each. chunks: for each chunk which of the distinct rows lie in it, and where.

    asked: the rows stored here that each rank wants, `received[rank]` of them. ahead: what was read before its time.
    """

    wanted: Duplicates
    chunks: list[tuple[Tensor, Tensor]] | None = None
    sent: list[int] | None = None
    received: list[int] | None = None
    asked: Request | None = None
    ahead: Ahead | None = None


class FullyShardedTables:
    """Rows of one shard, split evenly over the ranks of `copies` (those of V2). Methods as `Tables`, collective.

    The shard's rows are cut into chunks of M parts, one for each of M ranks, so that a chunk is one all-gather. Which
    rank has the first part goes round (`turns`): the first rows of a table are often its hot ones. own: this rank's
    rows and state. semantics: as in `ReplicatedTables`. reads: "rows" or "chunks". chunk_bytes: most bytes of rows
    gathered at a time (two half-size chunks: one in use, one under way). options: of `Tables`.
    """

    def __init__(
        self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, copies: Copies,
        semantics: str, reads: str, chunk_bytes: int, *, dtype: torch.dtype = torch.float32,
        numbers: dict[str, int] | None = None, **options) -> None:
        numbers = numbers or {piece.table: piece.at - piece.first for piece in pieces}
        self.options, group = {"dtype": dtype, "numbers": numbers, **options}, copies.group
        self.copies, self.semantics, self.reads, self.pieces_of_shard = copies, semantics, reads, list(pieces)
        ranks, limit = group.size(), max(chunk_bytes // (2 * dim * dtype.itemsize), group.size())
        self.chunks = max(-(-rows // limit), 1)
        self.span = -(-rows // (self.chunks * ranks))
        self.chunk_rows = self.span * ranks
        self.turns = self._turns(ranks)
        self.turn = torch.tensor(self.turns, device=device)
        mine = []
        for chunk, turn in enumerate(self.turns):
            mine += self._part(chunk, (group.rank() - turn) % ranks, chunk * self.span)
        self.own = Tables(mine, self.chunks * self.span, dim, device, **self.options)

    def _turns(self, ranks: int) -> list[int]:
        """For each chunk the rank that has its first part: chunk i of table t, at its beginning, gives t + i."""
        begins = [piece.at for piece in self.pieces_of_shard] or [0]
        turns = []
        for chunk in range(self.chunks):
            table = bisect_right(begins, chunk * self.chunk_rows) - 1
            turns.append((table + chunk - begins[table] // max(self.chunk_rows, 1)) % ranks)
        return turns

    def _part(self, chunk: int, part: int, at: int) -> list[Piece]:
        """The pieces in a part of a chunk, for a matrix that has the part at row `at`."""
        first = chunk * self.chunk_rows + part * self.span
        found = (piece.cut(first, first + self.span, at) for piece in self.pieces_of_shard)
        return [piece for piece in found if piece is not None]

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
    def columns(self) -> Columns | None:
        return self.own.columns

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
        chunk, within = rows // max(self.chunk_rows, 1), rows % max(self.chunk_rows, 1)
        height, ranks = self.own.weight.shape[0], self.copies.id_group.size()
        owner = (within // max(self.span, 1) + self.turn[chunk]) % ranks
        wanted = Duplicates.of(owner * height + chunk * self.span + within % max(self.span, 1))
        chunks = self._by_chunk(wanted.distinct) if self.reads == "chunks" else None
        if chunks is not None and (not learn or self.semantics == "average"):
            return SharedRequest(wanted, chunks)
        edges = torch.arange(ranks + 1, device=rows.device) * height
        sent, received = swap_counts(torch.searchsorted(wanted.distinct, edges).diff(), self.copies.id_group)
        asked = exchange(wanted.distinct % max(height, 1), sent, received, self.copies.id_group)
        return SharedRequest(wanted, chunks, sent, received, self.own.request(asked, learn))

    def lookup(self, request: SharedRequest, dtype: torch.dtype) -> Tensor:
        """`dtype` `[N, dim]`: the rows of the request."""
        ahead = request.ahead
        if ahead is None or ahead.found.dtype != dtype:
            found = self._read(request, dtype, self.copies.group)
        else:
            found = ahead.found
            changed = gather_rows(self.weight, ahead.asked).to(dtype)
            found.index_copy_(0, ahead.stale, exchange(changed, ahead.received, ahead.sent, self.copies.group))
        return gather_rows(found, request.wanted.inverse)

    def read_ahead(self, request: SharedRequest, dtype: torch.dtype, learning: list[SharedRequest]) -> SharedRequest:
        """As `Tables.read_ahead`; collective. May run beside the update: what that writes is read again."""
        if self.semantics == "average" or request.asked is None:
            return request
        changes = torch.zeros(self.weight.shape[0], dtype=torch.uint8, device=self.weight.device)
        for other in learning:
            if other.asked is not None:
                changes.index_fill_(0, other.asked.rows, 1)
        asked = changes.index_select(0, request.asked.rows)
        stale = exchange(asked, request.received, request.sent, self.copies.id_group)
        counts = torch.stack([part.sum() for part in (*stale.split(request.sent), *asked.split(request.received))])
        sent, received = counts.view(2, -1).tolist()
        asked = request.asked.rows.index_select(0, asked.nonzero().squeeze(1))
        stale = stale.nonzero().squeeze(1)
        found = self._read(request, dtype, self.copies.id_group)  # last: the host waits for nothing behind it
        return replace(request, ahead=Ahead(found, stale, sent, asked, received))

    def _read(self, request: SharedRequest, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        """`dtype` `[U, dim]`: the distinct rows of the request, over `group`."""
        if request.chunks is None:
            found = self.own.lookup(request.asked, dtype)
            return exchange(found, request.received, request.sent, group)
        found = self.weight.new_empty(request.wanted.distinct.shape[0], self.own.dim, dtype=dtype)
        for (where, rows), whole in zip(request.chunks, self._gathered([self.weight], group), strict=True):
            found.index_copy_(0, where, whole[0].index_select(0, rows).to(dtype))
        return found

    def update(self, arrived: list[tuple[SharedRequest, Tensor]], lr: float) -> None:
        """As `ReplicatedTables.update`."""
        if self.semantics == "average":
            wanted = [request.wanted for request, _ in arrived]
            rows = Duplicates.of(torch.cat([each.distinct.index_select(0, each.inverse) for each in wanted]))
            self._update_average(rows.distinct, rows.sum(torch.cat([grads for _, grads in arrived])), lr)
            return
        own = [
            (request.asked, exchange(request.wanted.sum(grads), request.sent, request.received, self.copies.group))
            for request, grads in arrived
        ]
        self.own.update(own, lr)

    def _update_average(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """Gather each chunk, update it with this rank's gradients, and keep the mean over ranks of this rank's part."""
        gathered = self._gathered([self.weight, self.moment], self.copies.group)
        for chunk, ((where, within), whole) in enumerate(zip(self._by_chunk(rows), gathered, strict=True)):
            self._update_chunk(chunk, whole, within, grads.index_select(0, where), lr)
        self.own.updates += 1

    def _update_chunk(self, chunk: int, whole: list[Tensor], rows: Tensor, grads: Tensor, lr: float) -> None:
        own, ranks = self.own, self.copies.group.size()
        parts = [self._part(chunk, (rank - self.turns[chunk]) % ranks, rank * self.span) for rank in range(ranks)]
        copy = Tables([piece for part in parts for piece in part], 0, own.dim, rows.device, **self.options)
        copy.weight, copy.moment = whole
        copy.updates = own.updates
        copy.update([(copy.request(rows, learn=True), grads)], lr)
        for stored, updated in zip((own.weight, own.moment), whole, strict=True):
            part = stored.narrow(0, chunk * self.span, self.span)
            mean = torch.empty_like(part, dtype=torch.float32)
            reduce_scatter(mean, updated.float(), group=self.copies.group)
            part.copy_(mean / self.copies.group.size())

    def _by_chunk(self, distinct: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each chunk which of the rows `distinct` (as in `SharedRequest.wanted`) lie in it, and where in it."""
        height, span = max(self.own.weight.shape[0], 1), max(self.span, 1)
        stored = distinct % height
        chunk, within = stored // span, distinct // height * span + stored % span
        order = chunk.argsort(stable=True)
        counts = torch.bincount(chunk, minlength=self.chunks).tolist() if self.chunks > 1 else [order.shape[0]]
        return [(where, within.index_select(0, where)) for where in order.split(counts)]

    def _gathered(self, stored: list[Tensor], group: dist.ProcessGroup) -> Iterator[list[Tensor]]:
        """The chunks of some of this rank's tensors, whole; the next one is under way while one is in use."""

        def start(chunk: int) -> list[tuple[Tensor, dist.Work]]:
            begun = []
            for tensor in stored:
                part = tensor.narrow(0, chunk * self.span, self.span)
                whole = part.new_empty(self.chunk_rows, *part.shape[1:])
                begun.append((whole, all_gather(whole, part, group=group, async_op=True)))
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
