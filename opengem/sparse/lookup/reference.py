"""The table-batched lookup and update in plain torch: what the kernels must give, and what the CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opengem.sparse import noise
from opengem.sparse.lookup.optimiser import Optimiser


def bag_of(offsets: Tensor, count: int) -> Tensor:
    """int64 `[N]`: the bag each position lies in. No host sync."""
    bags = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=count)


def number_rows(ids: Tensor, offsets: Tensor, first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """(row of the matrix for each position, bag of each position)."""
    bags = bag_of(offsets, ids.shape[0])
    each = max((offsets.shape[0] - 1) // first_rows.shape[0], 1)
    return ids + first_rows[bags // each], bags


def lookup(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, pooling: str, sample_weights: Tensor | None,
    dtype: torch.dtype) -> Tensor:
    rows, bags = number_rows(ids, offsets, first_rows)
    found = weight.index_select(0, rows)
    if pooling == "none":
        return found.to(dtype)
    found = found.float()
    if sample_weights is not None:
        found = found * sample_weights[:, None]
    out = sum_bags(found, torch.arange(ids.shape[0], device=ids.device), offsets)
    if pooling == "mean":
        out = out / offsets.diff().clamp(min=1)[:, None]
    return out.to(dtype)


def sum_bags(vectors: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """`[bags, D]`: sum of `vectors[positions[p]]` over the positions of each bag; in order, 0 for an empty one."""
    if positions.shape[0] == 0:
        return vectors.new_zeros(offsets.shape[0] - 1, vectors.shape[1])
    return F.embedding_bag(positions, vectors, offsets, mode="sum", include_last_offset=True)


def sum_segments(sorted_rows: Tensor, order: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct rows ascending, sum of `grads[order[p]]` over the positions of each), in order of position."""
    if order.shape[0] == 0:
        return sorted_rows, grads[:0]
    touched, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    return touched, F.embedding_bag(order, grads, counts.cumsum(0) - counts, mode="sum")


def update(
    weight: Tensor, state: dict[str, Tensor], rows: Tensor, grads: Tensor, optimiser: Optimiser, lr: float,
    step: int, rounding: noise.Rounding) -> None:
    """Step distinct `rows` `[U]` by summed gradients `[U, D]`."""
    old = weight.index_select(0, rows).float()
    if optimiser.kind == "sgd":
        new = old - lr * grads
    else:
        moment = state["moment"].index_select(0, rows)
        square = grads.square().mean(1)
        if optimiser.kind == "adagrad":
            moment = moment + square
            new = old - grads * (lr / ((moment * optimiser.moment_scale).sqrt() + optimiser.eps))[:, None]
        else:
            beta1, beta2 = optimiser.betas
            moment = beta2 * moment + (1 - beta2) * square
            mean = beta1 * state["mean"].index_select(0, rows) + (1 - beta1) * grads
            state["mean"].index_copy_(0, rows, mean)
            correction1, correction2 = optimiser.corrections(step)
            new = old - mean * (lr / correction1 / ((moment / correction2).sqrt() + optimiser.eps))[:, None]
        state["moment"].index_copy_(0, rows, moment)
    weight.index_copy_(0, rows, rounding(new, rows, weight.dtype, step))
