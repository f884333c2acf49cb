"""Several embedding tables of one width as one matrix, with the row-wise optimiser state beside it.

Table t owns the rows `[first[t], first[t] + rows[t])` of the matrix, so one gather serves every table and every
feature, and one update applies every gradient. Read `collection.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opengem.errors import UserError
from opengem.sparse import noise


@dataclass(frozen=True)
class Table:
    """`rows` consecutive rows of the table `name`, from row `origin` of the whole table on (0 unless it is a shard)."""

    name: str
    rows: int
    origin: int = 0


class Tables:
    """Rows and row-wise Adagrad state of some tables.

    weight: `[R, dim]`; moment: float32 `[R]`, the sum over steps of the mean squared gradient of each row.
    first: table name -> its first row. Zero tables and tables of zero rows are ordinary.
    """

    def __init__(
        self,
        tables: list[Table],
        dim: int,
        device: torch.device | str,
        *,
        eps: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tables, self.dim, self.eps = list(tables), dim, eps
        self.first: dict[str, int] = {}
        rows = 0
        for table in self.tables:
            self.first[table.name] = rows
            rows += table.rows
        self.weight = torch.empty(rows, dim, dtype=dtype, device=device)
        self.moment = torch.zeros(rows, dtype=torch.float32, device=device)

    def initialise(self, std: float, seed: int) -> None:
        """Rows from N(0, std²), keyed by (seed, table, row), and a zero state."""
        for table in self.tables:
            noise.fill_normal(self._rows(self.weight, table), noise.key("init", seed, table.name), table.origin, std)
        self.moment.zero_()

    def lookup(self, rows: Tensor) -> Tensor:
        """`[N, dim]`: the given rows (int64 `[N]`, in [0, R)) of the matrix."""
        return self.weight.index_select(0, rows)

    def update(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """One step of row-wise Adagrad. rows: int64 `[N]`, may repeat; grads: `[N, dim]`, one for each.

        Gradients of one row are summed first; then moment += mean(grad²) and
        weight -= lr * grad / (sqrt(moment) + eps). Rows not named stay as they are. N = 0 is a no-op.
        """
        if rows.shape[0] == 0:
            return
        touched, summed = sum_duplicates(rows, grads.to(torch.promote_types(self.weight.dtype, torch.float32)))
        moment = self.moment.index_select(0, touched) + summed.square().mean(1).to(self.moment.dtype)
        self.moment.index_copy_(0, touched, moment)
        scaled = summed / (moment.sqrt() + self.eps)[:, None].to(summed.dtype)
        self.weight.index_copy_(0, touched, (self.weight.index_select(0, touched) - lr * scaled).to(self.weight.dtype))

    def num_bytes(self) -> int:
        """Persistent bytes of rows and state."""
        return self.weight.nbytes + self.moment.nbytes

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{"weight": {table: [rows, dim]}, "moment": {table: [rows]}}; the tensors are views of the live storage."""
        return {
            "weight": {t.name: self._rows(self.weight, t) for t in self.tables},
            "moment": {t.name: self._rows(self.moment, t) for t in self.tables},
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copy in what `state_dict` gave. UserError names a missing table or a wrong shape; nothing is copied then."""
        own = self.state_dict()
        for kind, parts in own.items():
            for name, tensor in parts.items():
                given = state.get(kind, {}).get(name)
                if given is None:
                    raise UserError(f"checkpoint: no {kind} of table {name!r}; was it saved with the same schema?")
                if given.shape != tensor.shape:
                    raise UserError(
                        f"checkpoint: {kind} of table {name!r} is {list(given.shape)}, wanted {list(tensor.shape)}; "
                        "use the schema, sparse.dim and sparse.max_rows it was saved with"
                    )
        for kind, parts in own.items():
            for name, tensor in parts.items():
                tensor.copy_(state[kind][name])

    def _rows(self, tensor: Tensor, table: Table) -> Tensor:
        return tensor.narrow(0, self.first[table.name], table.rows)


def sum_duplicates(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct rows ascending, their summed gradients); summed in order of appearance, so the same bits every time."""
    ordered, order = rows.sort(stable=True)
    touched, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = counts.cumsum(0) - counts
    return touched, F.embedding_bag(order, grads, starts, mode="sum")
