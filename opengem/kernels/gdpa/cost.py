"""Useful work of GDPA, counted from lengths: padding, recomputation and masked tiles count 0."""

from __future__ import annotations

from collections.abc import Sequence

from opengem.kernels.jfa import cost as jfa

# Backward FLOPs as a multiple of forward: kernel tables follow the FlashAttention papers (five products, one of them
# the recomputed scores); MFU leaves the recomputation out.
BACKWARD_KERNEL = 2.5
BACKWARD_MFU = 2.0


def flops(q_lengths: Sequence[int], kv_lengths: Sequence[int], heads: int, head_dim: int) -> int:
    """Forward FLOPs: two products per (query, key) pair, `4 * heads * head_dim * sum(q_i * kv_i)`.

    Lengths are lists or integer tensors `[B]` (a tensor on a GPU is read back); the activation counts 0.
    """
    return jfa.flops(q_lengths, kv_lengths, heads, head_dim)


def bytes(
    q_lengths: Sequence[int], kv_lengths: Sequence[int], heads: int, head_dim: int, *,
    itemsize: int = 2, shared_q: bool = False, backward: bool = False,
) -> int:
    """Bytes that must cross the memory bus once. Forward: q, k, v, out. Backward: q, k, v, dout, dq, dk, dv.

    With `shared_q` the queries (and dq) are read (written) once, not once a sample.
    """
    q, kv = jfa.integers(q_lengths), jfa.integers(kv_lengths)
    seeds = max(q, default=0) if shared_q else sum(q)
    rows = 2 * seeds + sum(q) + 4 * sum(kv) if backward else seeds + sum(q) + 2 * sum(kv)
    return rows * heads * head_dim * itemsize
