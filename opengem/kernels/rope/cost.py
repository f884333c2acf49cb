"""Bytes that rotary position embedding has to move. Its FLOPs are element-wise and count as 0."""

from __future__ import annotations


def bytes(rows: int, heads: int, head_dim: int, *, item: int = 2, positions: int = 0) -> int:
    """Forward: x read once, the result written once, the fp32 cos and sin rows that are used read once.

    The backward moves the same. `item`: bytes an element. `positions`: the longest sample (table rows read).
    """
    return 2 * rows * heads * head_dim * item + 2 * positions * (head_dim // 2) * 4
