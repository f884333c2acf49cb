"""Which rank of a shard group keeps which part of each table.

A plan is a list of pieces for each rank. Tables go whole to the rank with the least to do (table-wise); a table too
large for one rank's fair part is cut into equal runs of rows over the ranks of one node, and one too large for a node's
part over all ranks (row-wise). Tables of a few rows, which every batch touches, may be copied to every rank
(data-parallel): their owner would else answer all others. A table with a few hot rows that is too large to be copied
may be cut by columns (column-wise), so that all ranks answer alike; this is chosen by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from opengem.errors import UserError
from opengem.sparse.table import Piece

PLACEMENTS = ("table", "node", "row", "copy", "column")
EVERYWHERE = ("copy", "column")  # every rank has a part of each row


@dataclass(frozen=True)
class Plan:
    """pieces: for each rank, what it keeps of the tables that are placed by rows, numbered from row 0 of its matrix
    without gaps. placement: table -> kind.

    load: for each rank, ids a sample it will look up (or whatever unit `plan` was given). row_bytes: of a row and its
    state. bytes_everywhere: of the tables that are copied or cut by columns, on each rank.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    placement: dict[str, str]
    load: tuple[float, ...]
    row_bytes: int
    bytes_everywhere: int = 0

    def rows(self, rank: int) -> int:
        return sum(piece.rows for piece in self.pieces[rank])

    def describe(self) -> str:
        """One line a rank: pieces, predicted bytes of rows and state, share of the load."""
        total = sum(self.load) or 1.0
        lines = ["rank  pieces         rows          bytes   load"]
        for rank, pieces in enumerate(self.pieces):
            rows = self.rows(rank)
            share = self.load[rank] / total
            size = rows * self.row_bytes + self.bytes_everywhere
            lines.append(f"{rank:4d}  {len(pieces):6d}  {rows:11,d}  {size:13,d}  {share:5.1%}")
        return "\n".join(lines)


def plan(
    rows: dict[str, int], world_size: int, *, row_bytes: int, load: dict[str, float] | None = None,
    ranks_per_node: int = 0, placement: dict[str, str] | None = None, copy_rows: int = 0) -> Plan:
    """Place tables (name -> rows) on `world_size` ranks.

    row_bytes: bytes of a row with its optimiser state. load: table -> ids looked up a sample, measured or counted
    (default 1 each). ranks_per_node: ranks that share the fast links (0: all). placement: table -> one of PLACEMENTS,
    to decide by hand. copy_rows: copy tables of at most that many rows. The result depends on the arguments alone, so
    every rank makes the same plan.
    """
    load = load or dict.fromkeys(rows, 1.0)
    node = ranks_per_node or world_size
    if world_size % node:
        raise UserError(f"plan: {world_size} ranks are no multiple of {node} ranks a node")
    fair = sum(rows.values()) / world_size
    kinds = {name: "table" if n <= fair else "node" if n <= fair * node else "row" for name, n in rows.items()}
    kinds |= {name: "copy" for name, n in rows.items() if n <= copy_rows}
    kinds |= _checked(placement or {}, rows)
    book = _Book([[] for _ in range(world_size)], [0.0] * world_size, sum(rows.values()) or 1, sum(load.values()) or 1)
    spread = [name for name in rows if kinds[name] not in EVERYWHERE]
    for name in sorted(spread, key=lambda name: (-PLACEMENTS.index(kinds[name]), -rows[name], name)):
        width = {"table": 1, "node": node, "row": world_size}[kinds[name]]
        first = min(range(0, world_size, width), key=lambda rank: (book.busy(rank, width), rank))
        for i in range(width):
            begin, end = rows[name] * i // width, rows[name] * (i + 1) // width
            if begin < end or width == 1:
                book.add(first + i, Piece(name, begin, end - begin, 0), load[name] * (end - begin) / max(rows[name], 1))
    everywhere = sum(_bytes_of_a_part(kinds[name], n, row_bytes, world_size) for name, n in rows.items())
    shared = sum(load[name] for name in rows if kinds[name] == "column") / world_size
    pieces, loads = (_numbered(pieces) for pieces in book.pieces), (own + shared for own in book.load)
    return Plan(tuple(pieces), kinds, tuple(loads), row_bytes, everywhere)


def _bytes_of_a_part(kind: str, rows: int, row_bytes: int, ranks: int) -> int:
    """What every rank keeps of a table that is copied or cut by columns; the state of a row, 4 bytes, is not cut."""
    return {"copy": rows * row_bytes, "column": rows * ((row_bytes - 4) // ranks + 4)}.get(kind, 0)


def _checked(placement: dict[str, str], rows: dict[str, int]) -> dict[str, str]:
    for name, kind in placement.items():
        if name not in rows:
            raise UserError(f"plan: no table {name!r}; tables are {', '.join(sorted(rows))}")
        if kind not in PLACEMENTS:
            raise UserError(f"plan: table {name!r} has placement {kind!r}, wanted one of {', '.join(PLACEMENTS)}")
    return placement


@dataclass
class _Book:
    pieces: list[list[Piece]]
    load: list[float]
    total_rows: int
    total_load: float

    def add(self, rank: int, piece: Piece, load: float) -> None:
        self.pieces[rank].append(piece)
        self.load[rank] += load

    def busy(self, first: int, width: int) -> float:
        """Part of all rows, or of the load, that these ranks have on average; the larger of the two."""
        ranks = range(first, first + width)
        rows = sum(piece.rows for rank in ranks for piece in self.pieces[rank])
        return max(rows / self.total_rows, sum(self.load[rank] for rank in ranks) / self.total_load) / width


def _numbered(pieces: list[Piece]) -> tuple[Piece, ...]:
    at, out = 0, []
    for piece in pieces:
        out.append(Piece(piece.table, piece.first, piece.rows, at))
        at += piece.rows
    return tuple(out)
