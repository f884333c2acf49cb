"""Table-batched lookup over many tables and features, and its update.

Tables of one width are one matrix `weight` `[R, D]`; feature f reads rows `first_rows[f] + id`. The bags of feature f
are `offsets[f * B : (f + 1) * B + 1]`, B bags for each feature, as in table-batched embedding libraries.

    out = lookup(weight, ids, offsets, first_rows, pooling="sum")
    order = sort_ids(weight, ids, offsets, first_rows, pooling="sum")     # needs no gradient: may run ahead
    orders = sort_all([Lookup(weight, ids, offsets, first_rows, "sum"), ...])     # the same for several
    update(weight, state, order, grad_out, optimiser, lr=0.1, step=1)

Ids are not range-checked here; `collection.IdReader` does it. Same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from opengem.kernels import backend
from opengem.sparse import noise
from opengem.sparse.lookup import reference
from opengem.sparse.lookup.optimiser import Optimiser

POOLINGS = ("sum", "mean", "none")


@dataclass(frozen=True)
class Order:
    """The ids of a batch in the order an update needs.

    keys: sorted row numbers. source: the row of the gradients that each position takes. span: which positions
    [first, last) of both are of this matrix, and the key of its row 0. coefficients: float32 `[last - first]` that
    multiply the gradients, or None for 1. pieces: how the kernels cut `keys` (None for the plain implementation).
    """

    keys: Tensor
    source: Tensor
    span: tuple[int, int, int]
    coefficients: Tensor | None
    pieces: tuple[Tensor, Tensor] | None


def lookup(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, *, pooling: str,
    sample_weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of `ids`, pooled by bag ("sum", "mean") or one for each id ("none").

    weight: `[R, D]` float32, bfloat16 or float16, 1 <= D <= 1024. ids: int64 `[N]`. offsets: int64 `[F * B + 1]`.
    first_rows: int64 `[F]`. sample_weights: float32 `[N]`, factors before the sum (pooling "sum" or "mean"; they get no
    gradient). Returns `dtype` `[F * B, D]`, an empty bag gives 0, or `[N, D]`. Sums are in float32.
    """
    _check(weight, ids, offsets, first_rows, pooling, sample_weights)
    arguments = (weight, ids, offsets, first_rows, pooling, sample_weights, dtype)
    return _implementation(weight).lookup(*arguments)


@dataclass(frozen=True)
class Lookup:
    """The arguments of one `lookup`; what they are is written there."""

    weight: Tensor
    ids: Tensor
    offsets: Tensor
    first_rows: Tensor
    pooling: str
    sample_weights: Tensor | None = None


def sort_ids(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, *, pooling: str,
    sample_weights: Tensor | None = None) -> Order:
    """The stable order of a batch's ids by row; arguments as for `lookup`, of `weight` only shape and device matter."""
    return sort_all([Lookup(weight, ids, offsets, first_rows, pooling, sample_weights)])[0]


def sort_all(lookups: list[Lookup]) -> list[Order]:
    """The order of each of several lookups of one device, by one sort: that is faster than a sort for each."""
    for x in lookups:
        _check(x.weight, x.ids, x.offsets, x.first_rows, x.pooling, x.sample_weights)
    if not lookups or _implementation(lookups[0].weight) is reference:
        return [_sort_plainly(x) for x in lookups]
    from opengem.sparse.lookup import triton

    bases = list(accumulate((x.weight.shape[0] for x in lookups), initial=0))
    firsts = list(accumulate((x.ids.shape[0] for x in lookups), initial=0))
    keys = lookups[0].ids.new_empty(firsts[-1], dtype=_key_dtype(bases[-1]))
    origins = torch.empty_like(keys, dtype=torch.int32)
    spans = list(zip(firsts, firsts[1:], bases, strict=False))
    for x, (first, last, base) in zip(lookups, spans, strict=True):
        part = (keys[first:last], origins[first:last])
        triton.number_rows(x.ids, x.offsets, x.first_rows, *part, base, x.pooling != "none")
    keys, order = keys.sort(stable=True)
    source, *pieces = triton.find_pieces(keys, order, origins) if firsts[-1] else (origins, keys, keys)
    found = []
    for x, span in zip(lookups, spans, strict=True):
        factors = _factors(x, origins[span[0] : span[1]])
        if factors is not None:
            factors = factors.index_select(0, order[span[0] : span[1]] - span[0])
        found.append(Order(keys, source, span, factors, tuple(pieces)))
    return found


def sort_rows(weight: Tensor, rows: Tensor) -> Order:
    """The order of row numbers int64 `[N]` of the matrix itself, with one gradient row each."""
    return _order_of(weight, *rows.to(_key_dtype(weight.shape[0])).sort(stable=True))


def sum_segments(segments: Tensor, order: Tensor, count: int, grads: Tensor) -> Tensor:
    """float32 `[count, D]`: the sum of `grads[order[p]]` over the positions p of each segment.

    segments: int64 `[N]` ascending, each of 0 ... count - 1 at least once. Sums are in order of position.
    """
    out = torch.zeros(count, grads.shape[1], dtype=torch.float32, device=grads.device)
    keys = segments.to(_key_dtype(count))
    update(out, {}, _order_of(out, keys, order), grads, Optimiser("sgd"), lr=-1.0, step=1)  # 0 + 1 x the sum
    return out


def _order_of(weight: Tensor, keys: Tensor, order: Tensor) -> Order:
    kernels, span = _implementation(weight), (0, keys.shape[0], 0)
    if kernels is reference or keys.shape[0] == 0:
        return Order(keys, order, span, None, None)
    source, *pieces = kernels.find_pieces(keys, order, torch.arange(span[1], dtype=torch.int32, device=keys.device))
    return Order(keys, source, span, None, tuple(pieces))


def _sort_plainly(x: Lookup) -> Order:
    rows, bags = reference.number_rows(x.ids, x.offsets, x.first_rows)
    rows, order = rows.sort(stable=True)
    factors, source = _factors(x, bags), bags.index_select(0, order) if x.pooling != "none" else order
    factors = factors.index_select(0, order) if factors is not None else None
    return Order(rows, source, (0, rows.shape[0], 0), factors, None)


def _factors(x: Lookup, bags: Tensor) -> Tensor | None:
    """float32 `[N]` that multiply the gradient of each position, or None for 1."""
    if x.pooling != "mean":
        return x.sample_weights
    each = 1 / x.offsets.diff().clamp(min=1).float().index_select(0, bags)
    return each if x.sample_weights is None else each * x.sample_weights


def update(
    weight: Tensor, state: dict[str, Tensor], order: Order, grads: Tensor, optimiser: Optimiser, *, lr: float,
    step: int, rounding: noise.Rounding | None = None) -> None:
    """Sum the gradients of each row in the batch, then step it once, in place.

    grads: float32 or 16-bit, `[F * B, D]` or `[N, D]` as `lookup` returned. state: from `optimiser.state`.
    step: 1, 2, ..., the number of this update. rounding: the noise for 16-bit rows (default: rows are numbered as in
    the matrix). No ids: nothing happens.
    """
    if order.span[0] == order.span[1]:
        return
    rounding = rounding or noise.Rounding.of([(0, 0)], weight.device)
    if order.pieces is None:
        grads = grads.index_select(0, order.source).float()
        if order.coefficients is not None:
            grads = grads * order.coefficients[:, None]
        every = torch.arange(grads.shape[0], device=grads.device)
        rows, summed = reference.sum_segments(order.keys, every, grads)
        reference.update(weight, state, rows.long(), summed, optimiser, lr, step, rounding)
        return
    scalars = (lr, optimiser.eps, optimiser.moment_scale, *optimiser.betas, *optimiser.corrections(step))
    _implementation(weight).update(
        weight, state.get("moment"), state.get("mean"), grads, order.keys, order.source, order.coefficients,
        *order.pieces, order.span, rounding.at_step(step), optimiser.kind, tuple(map(float, scalars)),
    )  # fmt: skip


def _implementation(weight: Tensor):
    if backend.implementation("sparse_lookup", weight.device, dtype=weight.dtype, dim=weight.shape[1]) == "reference":
        return reference
    from opengem.sparse.lookup import triton

    return triton


def _key_dtype(rows: int) -> torch.dtype:
    """int32 keys sort twice as fast; chosen by the number of rows alone, so every rank agrees."""
    return torch.int32 if rows < 2**31 else torch.int64


def _check(
    weight: Tensor, ids: Tensor, offsets: Tensor, first_rows: Tensor, pooling: str, sample_weights: Tensor | None
) -> None:
    if pooling not in POOLINGS:
        raise ValueError(f"sparse lookup: pooling {pooling!r}, wanted one of {', '.join(POOLINGS)}")
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= 1024 or not weight.is_contiguous():
        raise ValueError(f"sparse lookup: weight must be contiguous [R, D], 1 <= D <= 1024, got {list(weight.shape)}")
    for name, tensor in (("ids", ids), ("offsets", offsets), ("first_rows", first_rows)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError(f"sparse lookup: {name} must be int64 [n], got {tensor.dtype} {list(tensor.shape)}")
    features, bags = first_rows.shape[0], offsets.shape[0] - 1
    if features == 0 or bags % features:
        raise ValueError(
            f"sparse lookup: {features} features need offsets of length {features} * B + 1, got {offsets.shape[0]}"
        )
    if sample_weights is not None and (sample_weights.shape != ids.shape or pooling == "none"):
        raise ValueError(
            f"sparse lookup: sample_weights need pooling sum or mean and shape {list(ids.shape)}, "
            f"got {pooling} and {list(sample_weights.shape)}"
        )
    if ids.shape[0] >= 2**31:
        raise ValueError(f"sparse lookup: at most 2^31 - 1 ids a call, got {ids.shape[0]}; split the features")
