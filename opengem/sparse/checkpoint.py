"""Tables on disk in global logical form: runs of rows of named tables, whoever held them.

Every rank writes the runs it stores into its own file, so no process ever holds a whole table; any number of processes,
with any placement and generation, reads them back. Writing the folder atomically is the caller's part.
"""

from __future__ import annotations

from pathlib import Path

import torch

from opengem.errors import UserError
from opengem.sparse.collection import EmbeddingCollection


def save(collection: EmbeddingCollection, folder: Path, rank: int = 0) -> None:
    """Write this rank's runs to `folder/sparse.RANK.pt`. No collective: the caller waits for all ranks afterwards."""
    storage = collection.storage
    kept = [piece for piece in storage.pieces if storage.saves()]
    torch.save(
        {
            "tables": collection.rows,
            "dim": collection.dim,
            "updates": storage.updates,
            "runs": [
                {
                    "table": piece.table,
                    "first": piece.first,
                    "weight": piece.of(storage.weight).cpu().clone(),
                    "moment": piece.of(storage.moment).cpu().clone(),
                }
                for piece in kept
            ],
        },
        Path(folder) / f"sparse.{rank:05d}.pt",
    )


def load(collection: EmbeddingCollection, folder: Path) -> None:
    """Read what `save` wrote on any number of ranks. UserError where a table does not fit or rows are missing."""
    collection.discard()
    files = sorted(Path(folder).glob("sparse.*.pt"))
    if not files:
        raise UserError(f"checkpoint {folder} has no sparse.*.pt files; wanted a folder written by a training run")
    missing = {piece: piece.rows for piece in collection.storage.pieces}
    for file in files:
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if saved["tables"] != collection.rows or saved["dim"] != collection.dim:
            raise UserError(
                f"checkpoint {file} holds tables {saved['tables']} of width {saved['dim']}, wanted {collection.rows} "
                f"of width {collection.dim}; use the schema, sparse.dim and sparse.max_rows it was saved with"
            )
        for run in saved["runs"]:
            _copy_run(collection, run, missing)
        collection.storage.updates = saved["updates"]
    for piece, rows in missing.items():
        if rows:
            raise UserError(f"checkpoint {folder}: {rows} rows of table {piece.table!r} are in none of its files")


def _copy_run(collection: EmbeddingCollection, run: dict, missing: dict) -> None:
    storage, last = collection.storage, run["first"] + run["weight"].shape[0]
    for piece in missing:
        begin, end = max(piece.first, run["first"]), min(piece.first + piece.rows, last)
        if piece.table == run["table"] and begin < end:
            for kind in ("weight", "moment"):
                into = getattr(storage, kind).narrow(0, piece.at + begin - piece.first, end - begin)
                into.copy_(run[kind].narrow(0, begin - run["first"], end - begin))
            missing[piece] -= end - begin
