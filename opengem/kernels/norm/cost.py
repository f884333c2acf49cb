"""Bytes that the norms have to move. Their FLOPs are element-wise and count as 0."""

from __future__ import annotations


def bytes(rows: int, width: int, *, item: int = 2, residual: bool = False, quantize: bool = False) -> int:
    """Forward: x read and y written once; with a residual, that read and the sum written too.

    Quantised, y takes one byte an element and one byte a 32x32 block. Row statistics and weights are left out (under
    1 % for widths from 256 on).
    """
    elements = rows * width
    written = elements + -(-rows // 32) * -(-width // 32) if quantize else elements * item
    return elements * item + written + (2 * elements * item if residual else 0)


def backward_bytes(rows: int, width: int, *, item: int = 2, residual: bool = False) -> int:
    """The normalised input and the gradient read, one gradient written; with a residual, its gradient read as well."""
    return (4 if residual else 3) * rows * width * item
