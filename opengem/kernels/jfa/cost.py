"""Useful floating-point operations and bytes of jagged attention, in plain integers from the lengths.

Only scores the mask lets through count: no padding, no recomputation. The backward is counted as 2.5 forwards in kernel
tables (five matrix products for two, as the FlashAttention papers do) and as 2 forwards for MFU (without the recomputed
scores).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Lengths = Sequence[int] | Tensor


def visible_pairs(
    q_lengths: Lengths, kv_lengths: Lengths, *, causal: bool = False, window: tuple[int, int] | None = None
) -> int:
    """Number of (query, key) pairs that see each other, over all samples."""
    left, right = normalise_window(causal, window)
    return sum(_pairs(m, n, left, right) for m, n in zip(integers(q_lengths), integers(kv_lengths), strict=True))


def flops(
    q_lengths: Lengths, kv_lengths: Lengths, heads: int, head_dim: int, *,
    causal: bool = False, window: tuple[int, int] | None = None,
) -> int:
    """Useful forward FLOPs: `4 * heads * head_dim` for each visible pair."""
    return 4 * heads * head_dim * visible_pairs(q_lengths, kv_lengths, causal=causal, window=window)


def backward_flops(forward: int, *, recompute: bool = True) -> int:
    """2.5 forwards (`recompute`, the convention of kernel tables) or 2 forwards (the convention of MFU)."""
    return forward * 5 // 2 if recompute else forward * 2


def bytes(
    q_rows: int, kv_rows: int, heads: int, kv_heads: int, head_dim: int, *, itemsize: int = 2, backward: bool = False
) -> int:
    """Bytes of each tensor once: q, k, v, out forward; q, k, v, out, dout, dq, dk, dv backward (bias not counted)."""
    q_side, kv_side = q_rows * heads * head_dim, kv_rows * kv_heads * head_dim
    return itemsize * (4 * q_side + 4 * kv_side if backward else 2 * q_side + 2 * kv_side)


def normalise_window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) with -1 for no limit; causal means right = 0."""
    left, right = (-1, -1) if window is None else window
    return left, 0 if causal else right


def _pairs(m: int, n: int, left: int, right: int) -> int:
    # A query at position i + n - m sees keys up to `right` after it and, of those, not the ones over `left` before it.
    upto = m * n if right < 0 else _keys_upto(m, n, n - m + right)
    before = 0 if left < 0 else _keys_upto(m, n, n - m - left - 1)
    return max(0, upto - before)


def _keys_upto(m: int, n: int, distance: int) -> int:
    """Pairs of 0 <= i < m and 0 <= j < n with j - i <= distance."""
    return _ramp(distance + m, n) - _ramp(distance, n)


def _ramp(x: int, n: int) -> int:
    """Sum of clamp(y, 0, n) over all y <= x."""
    if x <= 0:
        return 0
    return x * (x + 1) // 2 if x <= n else n * (n + 1) // 2 + (x - n) * n


def integers(lengths: Lengths) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else [int(n) for n in lengths]
