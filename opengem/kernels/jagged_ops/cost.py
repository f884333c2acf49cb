"""Bytes of the jagged copies and FLOPs of the jagged product. `row` is the bytes of one row."""

from __future__ import annotations


def pad_bytes(rows: int, batch: int, max_length: int, row: int) -> int:
    """jagged to padded: every row read once, every cell written once."""
    return (rows + batch * max_length) * row


def unpad_bytes(rows: int, row: int) -> int:
    """padded to jagged, concat, split, gather: each row of the result read once and written once."""
    return 2 * rows * row


def broadcast_add_bytes(rows: int, batch: int, row: int) -> int:
    """Values read and written, the dense rows read once."""
    return (2 * rows + batch) * row


def segment_sum_bytes(rows: int, batch: int, row: int) -> int:
    """Values read, one row a sample written."""
    return (rows + batch) * row


def bmm_bytes(rows: int, batch: int, inner: int, columns: int, item: int) -> int:
    """Values and dense read, the product written."""
    return (rows * (inner + columns) + batch * inner * columns) * item


def bmm_backward_bytes(rows: int, batch: int, inner: int, columns: int, item: int) -> int:
    """Gradient, values and dense read once, both gradients written."""
    return (rows * (2 * inner + columns) + 2 * batch * inner * columns) * item


def bmm_flops(rows: int, inner: int, columns: int) -> int:
    """`2 * T * K * N`; the backward does twice that."""
    return 2 * rows * inner * columns
