"""Several embedding tables of one width as one matrix, with the row-wise optimiser state beside it.

One gather serves every table and every feature, and one update applies every gradient. `Tables` is the storage of one
process; `sharded_2d.ReplicatedTables` and `fully_sharded_2d.FullyShardedTables` offer the same methods over a group.
Read `collection.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opengem.sparse import noise
from opengem.sparse.lookup import op
from opengem.sparse.lookup.optimiser import Optimiser
from opengem.sparse.lookup.reference import sum_segments


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


class Tables:
    """Rows and row-wise Adagrad state, kept whole on this device.

    weight: `[R, dim]`; moment: float32 `[R]`, the sum over steps of the mean squared gradient of each row.
    pieces: what the rows are. R = 0 is ordinary. numbers: table -> number of its first row among the rows of all
    tables, which keys the noise of 16-bit rows (default: as `pieces` lie).
    """

    def __init__(self, pieces: list[Piece], rows: int, dim: int, device: torch.device | str, *, eps: float,
                 dtype: torch.dtype = torch.float32, numbers: dict[str, int] | None = None) -> None:
        self.pieces, self.dim, self.eps, self.updates = list(pieces), dim, eps, 0
        self.weight = torch.zeros(rows, dim, dtype=dtype, device=device)
        self.moment = torch.zeros(rows, dtype=torch.float32, device=device)
        self.optimiser = Optimiser("adagrad", eps)
        numbers = numbers or {piece.table: piece.at - piece.first for piece in self.pieces}
        runs = [(numbers[piece.table] + piece.first, piece.at) for piece in self.pieces if piece.rows]
        self.rounding = noise.Rounding.of(runs, device)

    def initialise(self, std: float, seed: int) -> None:
        """Rows from N(0, std²), keyed by (seed, table, row), and a zero state."""
        for piece in self.pieces:
            noise.fill_normal(piece.of(self.weight), noise.key("init", seed, piece.table), piece.first, std)
        self.moment.zero_()
        self.updates = 0

    def lookup(self, rows: Tensor) -> Tensor:
        """float32 `[N, dim]`: the given rows (int64 `[N]`, in [0, R)) of the matrix."""
        return self.weight.index_select(0, rows).float()

    def update(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """One step of row-wise Adagrad. rows: int64 `[N]`, may repeat; grads: float32 `[N, dim]`, one for each.

        Gradients of one row are summed first; then moment += mean(grad²) and
        weight -= lr * grad / (sqrt(moment) + eps). Rows not named stay as they are. N = 0 is a no-op.
        """
        self.updates += 1
        order = op.sort_rows(self.weight, rows)
        op.update(self.weight, {"moment": self.moment}, order, grads, self.optimiser, lr=lr, step=self.updates,
                  rounding=self.rounding)

    def num_bytes(self) -> int:
        """Persistent bytes of rows and state."""
        return self.weight.nbytes + self.moment.nbytes

    def first_copy(self) -> bool:
        """Whether these rows are the first of their copies."""
        return True

    def assert_equal(self) -> None:
        """RuntimeError if copies on other ranks differ; there are none here."""


def sum_duplicates(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct rows ascending, their summed gradients); summed in order of appearance, so the same bits every time."""
    return sum_segments(*rows.sort(stable=True), grads)
