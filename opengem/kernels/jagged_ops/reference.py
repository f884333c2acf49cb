"""Definitions of the jagged copies and products, in plain PyTorch and without host syncs. Fast versions: `triton.py`.

Every function maps rows to samples with one binary search over the offsets, so rows behind `offsets[-1]` (which only a
caller on a GPU can have) are recognised and give zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

PADDED_ELEMENTS = 1 << 24  # how much padded scratch one step of the batched product may use


def rows_to_samples(offsets: Tensor, rows: int) -> Tensor:
    """int64 `[rows]`: the sample of each row (the last sample for rows behind the end). Needs B >= 1."""
    row = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp_(max=offsets.shape[0] - 2)


def _columns(tensor: Tensor, mask: Tensor) -> Tensor:
    """`mask` with trailing dimensions of size 1 so that it broadcasts over `tensor`."""
    return mask.reshape(mask.shape + (1,) * (tensor.dim() - mask.dim()))


def jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float) -> Tensor:
    """`[T, ...]` to `[B, max_length, ...]`; cells without a row hold `fill`, rows past `max_length` are dropped."""
    batch = offsets.shape[0] - 1
    slot = torch.arange(max_length, device=values.device)
    if values.shape[0] == 0 or batch == 0:
        return values.new_full((batch, max_length, *values.shape[1:]), fill)
    row = offsets[:-1, None] + slot
    live = row < offsets[1:, None]
    padded = values[row.clamp(max=values.shape[0] - 1)]
    return padded.masked_fill_(_columns(padded, ~live), fill)


def padded_to_jagged(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """`[B, L, ...]` to `[rows, ...]`; rows past L in their sample, or behind `offsets[-1]`, are zero."""
    if rows == 0 or padded.shape[0] == 0 or padded.shape[1] == 0:
        return padded.new_zeros((rows, *padded.shape[2:]))
    sample = rows_to_samples(offsets, rows)
    row = torch.arange(rows, device=padded.device)
    slot = row - offsets[sample]
    live = (slot < padded.shape[1]) & (row < offsets[-1])
    values = padded[sample, slot.clamp(max=padded.shape[1] - 1)]
    return values.masked_fill_(_columns(values, ~live), 0)


def _concat_sources(left_offsets: Tensor, right_offsets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row of the concatenation: whether it comes from the left, its row there, its row on the right, live."""
    sample = rows_to_samples(left_offsets + right_offsets, rows)
    row = torch.arange(rows, device=left_offsets.device)
    left_row = row - right_offsets[sample]
    right_row = row - left_offsets[sample + 1]
    return left_row < left_offsets[sample + 1], left_row, right_row, row < left_offsets[-1] + right_offsets[-1]


def concat_jagged(left: Tensor, right: Tensor, left_offsets: Tensor, right_offsets: Tensor) -> Tensor:
    """Rows of sample b: those of `left`'s sample b, then those of `right`'s. `[Tl + Tr, ...]`."""
    rows = left.shape[0] + right.shape[0]
    out = left.new_empty((rows, *left.shape[1:]))
    if rows == 0 or left_offsets.shape[0] == 1:
        return out.zero_()
    from_left, left_row, right_row, live = _concat_sources(left_offsets, right_offsets, rows)
    joined = torch.cat([left, right])
    source = torch.where(from_left, left_row, right_row + left.shape[0]).clamp(0, rows - 1)
    return joined[source].masked_fill_(_columns(joined, ~live), 0)


def split_jagged(values: Tensor, left_offsets: Tensor, right_offsets: Tensor, left_rows: int) -> tuple[Tensor, Tensor]:
    """The inverse of `concat_jagged`: `[left_rows, ...]` and `[T - left_rows, ...]`."""
    parts = []
    for rows, mine, shift in ((left_rows, left_offsets, right_offsets[:-1]),
                              (values.shape[0] - left_rows, right_offsets, left_offsets[1:])):
        if rows == 0 or mine.shape[0] == 1:
            parts.append(values.new_zeros((rows, *values.shape[1:])))
            continue
        row = torch.arange(rows, device=values.device)
        source = (row + shift[rows_to_samples(mine, rows)]).clamp(max=values.shape[0] - 1)
        parts.append(values[source].masked_fill_(_columns(values, row >= mine[-1]), 0))
    return parts[0], parts[1]


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`."""
    return values.index_select(0, index)


def gather_rows_backward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """`[rows, ...]`: the sum of `grad` over every use of a row, in order of use (sorted, so no atomic decides)."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    order = torch.argsort(index, stable=True)
    starts = torch.searchsorted(index[order], torch.arange(rows + 1, device=grad.device))
    return segment_sum(grad[order].to(wide), starts).to(grad.dtype)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """`[B, ...]`: the sum over each sample's rows, computed in >= fp32, returned in the dtype of `values`."""
    batch = offsets.shape[0] - 1
    wide = torch.promote_types(values.dtype, torch.float32)
    if batch == 0 or values.shape[0] == 0:
        return values.new_zeros((batch, *values.shape[1:]))
    lengths = offsets.diff().long()
    flat = values.reshape(values.shape[0], -1).to(wide)
    if values.is_cuda:  # segment_reduce checks its lengths on the host
        out = flat.new_zeros(batch, flat.shape[1]).index_add_(0, rows_to_samples(offsets, flat.shape[0]), flat)
    else:
        out = torch.segment_reduce(flat, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)
    return out.to(values.dtype).reshape(batch, *values.shape[1:])


def broadcast_add(values: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    """`values[t] + dense[sample of t]`; rows behind `offsets[-1]` are returned unchanged."""
    if values.shape[0] == 0 or offsets.shape[0] == 1:
        return values.clone(memory_format=torch.contiguous_format)
    added = dense[rows_to_samples(offsets, values.shape[0])]
    behind = torch.arange(values.shape[0], device=values.device) >= offsets[-1]
    return values + added.masked_fill_(_columns(added, behind), 0)


def _sample_chunks(batch: int, elements: int):
    """(first, last) sample of each step so that a step's padded scratch stays within PADDED_ELEMENTS."""
    step = max(1, PADDED_ELEMENTS // max(1, elements))
    return ((first, min(first + step, batch)) for first in range(0, batch, step))


def jagged_dense_bmm(values: Tensor, dense: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """`values[t] @ dense[sample of t]`: `[T, K]` and `[B, K, N]` to `[T, N]`."""
    rows, (batch, inner, columns) = values.shape[0], dense.shape
    out = values.new_zeros(rows + 1, columns)  # the last row takes what padding cells write
    if rows == 0 or batch == 0 or max_length == 0:
        return out[:rows]
    wide = torch.promote_types(values.dtype, torch.float32)
    slot = torch.arange(max_length, device=values.device)
    for first, last in _sample_chunks(batch, max_length * max(inner, columns)):
        row = offsets[first:last, None] + slot
        target = torch.where(row < offsets[first + 1 : last + 1, None], row, rows)
        padded = values[target.clamp(max=rows - 1)].to(wide)
        product = torch.bmm(padded, dense[first:last].to(wide))
        out.index_copy_(0, target.flatten().long(), product.flatten(0, 1).to(values.dtype))
    return out[:rows]


def jagged_dense_bmm_backward(grad: Tensor, values: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """Gradient for `dense`: `values_b^T @ grad_b` for each sample, `[B, K, N]`."""
    batch = offsets.shape[0] - 1
    wide = torch.promote_types(values.dtype, torch.float32)
    out = values.new_zeros(batch, values.shape[1], grad.shape[1])
    for first, last in _sample_chunks(batch, max_length * max(values.shape[1], grad.shape[1])):
        left = jagged_to_padded(values, offsets[first : last + 1], max_length, 0.0).to(wide)
        right = jagged_to_padded(grad, offsets[first : last + 1], max_length, 0.0).to(wide)
        out[first:last] = torch.bmm(left.transpose(1, 2), right).to(values.dtype)
    return out
