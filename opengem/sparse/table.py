"""Several embedding tables of one width as one matrix, with the row-wise optimiser state beside it.

One gather serves every table and every feature, and one update applies every gradient. `Tables` is the storage of one
process; `sharded_2d.ReplicatedTables` and `fully_sharded_2d.FullyShardedTables` offer the same methods over a group.
Read `collection.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opengem.sparse import noise
from opengem.sparse.lookup import op
from opengem.sparse.lookup.optimiser import Optimiser


@dataclass(frozen=True)
class Piece:
    """Rows `[first, first + rows)` of `table` are kept at rows `[at, at + rows)` of a matrix."""

    table: str
    first: int
    rows: int
    at: int

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of the matrix (or of the state beside it), a view."""
        return tensor.narrow(0, self.at, self.rows)

    def cut(self, first: int, last: int, at: int) -> Piece | None:
        """What of this piece lies in rows `[first, last)`, for a matrix with row `first` at `at`; None: nothing."""
        begin, end = max(self.at, first), min(self.at + self.rows, last)
        return Piece(self.table, self.first + begin - self.at, end - begin, at + begin - first) if begin < end else None


@dataclass(frozen=True)
class Request:
    """Rows asked of a storage, and all that can be prepared before their values and gradients are known.

    rows: int64 `[N]` in the storage's numbering. order: of the update that will follow, or None. distinct: the
    duplicates in `rows`, where columns are cut and an update will follow.
    """

    rows: Tensor
    order: op.Order | None
    distinct: Duplicates | None = None


@dataclass(frozen=True)
class Columns:
    """A matrix holds columns [first, first + its width) of rows of width `dim`; ranks of `group` have the others."""

    first: int
    dim: int
    group: dist.ProcessGroup


class Tables:
    """Rows and row-wise Adagrad state, kept whole on this device.

    weight: `[R, dim]`; moment: float32 `[R]`, the sum over steps of the mean squared gradient of each row.
    pieces: what the rows are. R = 0 is ordinary. numbers: table -> number of its first row among the rows of all
    tables, which keys the noise of 16-bit rows (default: as `pieces` lie). columns: which columns `dim` counts, where
    they are not all; `update` is then collective over their group, and every rank brings the same requests.
    """

    def __init__(self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, *, eps: float,
                 dtype: torch.dtype = torch.float32, numbers: dict[str, int] | None = None,
                 columns: Columns | None = None) -> None:
        self.pieces, self.dim, self.eps, self.updates, self.columns = list(pieces), dim, eps, 0, columns
        self.weight = torch.zeros(rows, dim, dtype=dtype, device=device)
        self.moment = torch.zeros(rows, dtype=torch.float32, device=device)
        self.optimiser = Optimiser("adagrad", eps)
        numbers = numbers or {piece.table: piece.at - piece.first for piece in self.pieces}
        runs = [(numbers[piece.table] + piece.first, piece.at) for piece in self.pieces if piece.rows]
        self.rounding = noise.Rounding.of(runs, device)

    def initialise(self, std: float, seed: int) -> None:
        """Rows from N(0, std²), keyed by (seed, table, row), and a zero state."""
        for piece in self.pieces:
            key = noise.key("init", seed, piece.table)
            if self.columns is None:
                noise.fill_normal(piece.of(self.weight), key, piece.first, std)
            else:
                self._fill_columns(piece, key, std)
        self.moment.zero_()
        self.updates = 0

    def _fill_columns(self, piece: Piece, key: int, std: float, rows: int = 1 << 16) -> None:
        first, own = self.columns.first, piece.of(self.weight)
        for begin in range(0, piece.rows, rows):
            part = own[begin : begin + rows]
            whole = part.new_empty(part.shape[0], self.columns.dim)
            noise.fill_normal(whole, key, piece.first + begin, std)
            part.copy_(whole[:, first : first + self.dim])

    def request(self, rows: Tensor, learn: bool) -> Request:
        """Rows (int64 `[N]`, in [0, R), may repeat) that will be looked up and, if `learn`, updated."""
        if self.columns is not None:
            return Request(rows, None, Duplicates.of(rows) if learn else None)
        return Request(rows, op.sort_rows(self.weight, rows) if learn else None)

    def lookup(self, request: Request, dtype: torch.dtype) -> Tensor:
        """`dtype` `[N, dim]`: the rows of the request."""
        bounds = torch.arange(2, device=request.rows.device) * request.rows.shape[0]  # one feature with all ids
        return op.lookup(self.weight, request.rows, bounds, bounds[:1], pooling="none", dtype=dtype)

    def read_ahead(self, request: Request, dtype: torch.dtype, learning: list[Request]) -> Request:
        """A request for which rows were read before the update of those in `learning`; here nothing is gained by it."""
        return request

    def update(self, arrived: list[tuple[Request, Tensor]], lr: float) -> None:
        """One step of row-wise Adagrad, from requests and `[N, dim]` gradients of each of their rows.

        Gradients of one row are summed first; then moment += mean(grad²) and
        weight -= lr * grad / (sqrt(moment) + eps). Rows not named stay as they are. N = 0 is a no-op.
        """
        self.updates += 1
        if self.columns is not None:
            self._update_columns(arrived, lr)
            return
        order, grads = arrived[0][0].order, torch.cat([grads for _, grads in arrived])
        if len(arrived) > 1:
            order = op.sort_rows(self.weight, torch.cat([request.rows for request, _ in arrived]))
        op.update(self.weight, {"moment": self.moment}, order, grads, self.optimiser, lr=lr, step=self.updates,
                  rounding=self.rounding)

    def _update_columns(self, arrived: list[tuple[Request, Tensor]], lr: float) -> None:
        """The same step; the mean of a row's squared gradient is added up over the ranks that hold its columns."""
        distinct = arrived[0][0].distinct
        if len(arrived) > 1:
            distinct = Duplicates.of(torch.cat([request.rows for request, _ in arrived]))
        rows, grads = distinct.distinct, distinct.sum(torch.cat([grads for _, grads in arrived]))
        square = grads.square().sum(1)
        dist.all_reduce(square, group=self.columns.group)
        moment = self.moment.index_select(0, rows) + square / self.columns.dim
        new = self.weight.index_select(0, rows).float() - lr * grads / (moment.sqrt() + self.eps)[:, None]
        self.moment.index_copy_(0, rows, moment)
        new = self.rounding(new, rows, self.weight.dtype, self.updates, self.columns.first)
        self.weight.index_copy_(0, rows, new)

    def num_bytes(self) -> int:
        """Persistent bytes of rows and state."""
        return self.weight.nbytes + self.moment.nbytes

    def first_copy(self) -> bool:
        """Whether these rows are the first of their copies."""
        return True

    def assert_equal(self) -> None:
        """RuntimeError if copies on other ranks differ; there are none here."""


@dataclass(frozen=True)
class Duplicates:
    """Which of row numbers int64 `[N]` are equal; made before their gradients are known, so `sum` waits for no host.

    distinct: `[U]` ascending. inverse: `[N]`, which of them each is. order: `[N]`, positions sorted by row, stable.
    segments: `[N]`, `inverse` in that order.
    """

    distinct: Tensor
    inverse: Tensor
    order: Tensor
    segments: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Duplicates:
        ascending, order = rows.sort(stable=True)
        distinct, counts = torch.unique_consecutive(ascending, return_counts=True)
        every = torch.arange(distinct.shape[0], device=rows.device)
        segments = torch.repeat_interleave(every, counts, output_size=rows.shape[0])
        return cls(distinct, torch.empty_like(order).index_copy_(0, order, segments), order, segments)

    def sum(self, grads: Tensor) -> Tensor:
        """float32 `[U, dim]`: gradients `[N, dim]` summed by row, in order of appearance: the same bits every time."""
        return op.sum_segments(self.segments, self.order, self.distinct.shape[0], grads)
