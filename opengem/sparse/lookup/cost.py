"""Least bytes a lookup and its update can move: each distinct row once, ids, offsets, weights and outputs once."""

from __future__ import annotations


def forward_bytes(ids: int, distinct: int, offsets: int, outputs: int, dim: int, row_bytes: int, weighted: bool) -> int:
    """ids: looked up; distinct: rows among them; outputs: vectors written; row_bytes: bytes of one element."""
    return (distinct + outputs) * dim * row_bytes + 8 * ids + 8 * offsets + 4 * ids * weighted


def update_bytes(ids: int, distinct: int, offsets: int, outputs: int, dim: int, row_bytes: int, weighted: bool) -> int:
    """Output gradients once, distinct rows read and written, their float32 state read and written, ids and offsets."""
    rows = 2 * distinct * dim * row_bytes + 8 * distinct
    return outputs * dim * row_bytes + rows + 8 * ids + 8 * offsets + 4 * ids * weighted
