"""Useful FLOPs and bytes of block attention."""

from __future__ import annotations

from collections.abc import Iterable

BACKWARD_KERNEL = 2.5  # the FlashAttention convention of kernel tables: five products, one of them a recomputation
BACKWARD_MFU = 2.0  # without the recomputation


def pairs(lengths: Iterable[int], block: int = 64) -> int:
    """(query, key) pairs the mask lets through: full blocks give block^2, the last one its own length squared."""
    return sum((n // block) * block * block + (n % block) ** 2 for n in map(int, lengths))


def flops(lengths: Iterable[int], heads: int, head_dim: int, *, block: int = 64) -> int:
    """Forward: `4 * H * D * pairs`. A kernel table counts the backward as 2.5 times that, MFU as 2 times."""
    return 4 * heads * head_dim * pairs(lengths, block)


def bytes(rows: int, heads: int, head_dim: int, *, item: int = 2, positions: int = 0) -> int:
    """Forward: q, k, v read and the output written once; with RoPE the fp32 table rows of `positions` read once."""
    return 4 * rows * heads * head_dim * item + 2 * positions * (head_dim // 2) * 4


def backward_bytes(rows: int, heads: int, head_dim: int, *, item: int = 2, positions: int = 0) -> int:
    """q, k, v and the output gradient read, three gradients written; neither output nor log-sum-exp is read."""
    return 7 * rows * heads * head_dim * item + 2 * positions * (head_dim // 2) * 4
