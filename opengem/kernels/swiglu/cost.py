"""Bytes that SwiGLU has to move. Its FLOPs are element-wise and count as 0."""

from __future__ import annotations


def bytes(rows: int, width: int, *, item: int = 2) -> int:
    """Forward: gate and up `[rows, width]` read, the result written."""
    return 3 * rows * width * item


def backward_bytes(rows: int, width: int, *, item: int = 2) -> int:
    """Backward: gate, up and the output gradient read, two gradients written."""
    return 5 * rows * width * item
