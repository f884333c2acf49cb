"""Copies and products between jagged rows (`values` `[T, ...]`, `offsets` `[B + 1]`) and dense tensors.

Everywhere: offsets are int32 or int64 on the device of the values; sizes that decide an output's shape are host ints,
so nothing waits for the GPU; empty samples and an empty batch are ordinary; gradients are sums in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.jagged_ops import reference
from opengem.kernels.jagged_ops.check import check_offsets, check_same, host_readable


def _implementation(values: Tensor):
    if backend.implementation("jagged_ops", values.device, dtype=values.dtype) == "reference":
        return reference
    from opengem.kernels.jagged_ops import triton

    return triton


# ---- jagged <-> padded -------------------------------------------------------------------------------------------


def jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, *, fill: float = 0.0,
                     truncate: bool = False) -> Tensor:
    """`[T, ...]` to `[B, max_length, ...]`; cells behind a sample hold `fill`.

    A sample longer than `max_length` is a ValueError where the host can see it, unless `truncate`: then (and always on
    a GPU, where lengths are not read) its rows past `max_length` are dropped and get gradient 0.
    """
    check_offsets("jagged_to_padded", offsets, values.shape[0], values.device, None if truncate else max_length)
    return _to_padded(values, offsets, max_length, fill)


def padded_to_jagged(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """`[B, L, ...]` to `[rows, ...]`: the first `length[b]` cells of each sample. `rows` is the host's `offsets[-1]`.

    Rows past L in their sample are zero (on a CPU a sample longer than L is a ValueError).
    """
    if padded.dim() < 2 or padded.shape[0] != offsets.shape[0] - 1:
        raise ValueError(
            f"padded_to_jagged: padded must be [B, L, ...] with B = {offsets.shape[0] - 1}, got {list(padded.shape)}"
        )
    check_offsets("padded_to_jagged", offsets, rows, padded.device, padded.shape[1])
    return _to_jagged(padded, offsets, rows)


def _run_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float) -> Tensor:
    return _implementation(values).jagged_to_padded(values, offsets, max_length, fill)


def _fake_to_padded(values, offsets, max_length, fill):
    return values.new_empty((offsets.shape[0] - 1, max_length, *values.shape[1:]))


def _run_to_jagged(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    return _implementation(padded).padded_to_jagged(padded, offsets, rows)


def _fake_to_jagged(padded, offsets, rows):
    return padded.new_empty((rows, *padded.shape[2:]))


def _save_padded(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape[0 if output.dim() > inputs[0].dim() else 1]


_to_padded = define("jagged_to_padded", _run_to_padded, _fake_to_padded, _save_padded, lambda ctx, grad: (
    _to_jagged(grad, *ctx.saved_tensors, ctx.size), None, None, None))
_to_jagged = define("padded_to_jagged", _run_to_jagged, _fake_to_jagged, _save_padded, lambda ctx, grad: (
    _to_padded(grad, *ctx.saved_tensors, ctx.size, 0.0), None, None))


# ---- concat, split -----------------------------------------------------------------------------------------------


def concat_jagged(left: Tensor, right: Tensor, left_offsets: Tensor, right_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(values `[Tl + Tr, ...]`, offsets `[B + 1]`): each sample is its left rows followed by its right rows."""
    check_same("concat_jagged", left=left, right=right)
    if left.shape[1:] != right.shape[1:] or left_offsets.shape != right_offsets.shape:
        raise ValueError(
            f"concat_jagged: rows and batch must agree, got {list(left.shape)} and {list(right.shape)}, "
            f"{left_offsets.shape[0] - 1} and {right_offsets.shape[0] - 1} samples"
        )
    check_offsets("concat_jagged left", left_offsets, left.shape[0], left.device)
    check_offsets("concat_jagged right", right_offsets, right.shape[0], right.device)
    return _concat(left, right, left_offsets, right_offsets), left_offsets + right_offsets


def split_jagged(values: Tensor, left_offsets: Tensor, right_offsets: Tensor, left_rows: int) -> tuple[Tensor, Tensor]:
    """The inverse of `concat_jagged`: (`[left_rows, ...]`, `[T - left_rows, ...]`).

    left_rows: the host's `left_offsets[-1]`.
    """
    if left_offsets.shape != right_offsets.shape or not 0 <= left_rows <= values.shape[0]:
        raise ValueError(
            f"split_jagged: offsets must cover one batch and left_rows lie in [0, {values.shape[0]}], got "
            f"{left_offsets.shape[0] - 1} and {right_offsets.shape[0] - 1} samples, left_rows {left_rows}"
        )
    check_offsets("split_jagged left", left_offsets, left_rows, values.device)
    check_offsets("split_jagged right", right_offsets, values.shape[0] - left_rows, values.device)
    return _split(values, left_offsets, right_offsets, left_rows)


def _run_concat(left: Tensor, right: Tensor, left_offsets: Tensor, right_offsets: Tensor) -> Tensor:
    return _implementation(left).concat_jagged(left, right, left_offsets, right_offsets)


def _fake_concat(left, right, left_offsets, right_offsets):
    return left.new_empty((left.shape[0] + right.shape[0], *left.shape[1:]))


def _run_split(values: Tensor, left_offsets: Tensor, right_offsets: Tensor, left_rows: int) -> tuple[Tensor, Tensor]:
    return _implementation(values).split_jagged(values, left_offsets, right_offsets, left_rows)


def _fake_split(values, left_offsets, right_offsets, left_rows):
    tail = values.shape[1:]
    return values.new_empty((left_rows, *tail)), values.new_empty((values.shape[0] - left_rows, *tail))


def _save_concat(ctx, inputs, output):
    ctx.save_for_backward(*inputs[2:])
    ctx.left_rows = inputs[0].shape[0]


def _save_split(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:3])


_concat = define("concat_jagged", _run_concat, _fake_concat, _save_concat, lambda ctx, grad: (
    *_split(grad, *ctx.saved_tensors, ctx.left_rows), None, None))
_split = define("split_jagged", _run_split, _fake_split, _save_split, lambda ctx, left, right: (
    _concat(left, right, *ctx.saved_tensors), None, None, None))


# ---- gather, broadcast add ---------------------------------------------------------------------------------------


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`: `[T, ...]` by an integer `index` `[n]` to `[n, ...]`.

    The backward adds up repeated rows in order of use. On a CPU an index outside [0, T) is a ValueError; on a GPU it
    reads as zeros and its gradient is dropped. T and n stay below 2^31.
    """
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gather_rows: index must be int32 or int64 [n], got {index.dtype} {list(index.shape)}")
    if index.shape[0] >= 1 << 31 or values.shape[0] >= 1 << 31:
        sizes = f"{index.shape[0]} of {values.shape[0]}"
        raise ValueError(f"gather_rows: at most 2^31 - 1 rows, got {sizes}; gather in parts")
    if host_readable(index) and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= values.shape[0]:
            raise ValueError(f"gather_rows: index must lie in [0, {values.shape[0]}), got {low} to {high}")
    return _gather(values, index)


def _run_gather(values: Tensor, index: Tensor) -> Tensor:
    return _implementation(values).gather_rows(values, index)


def _fake_gather(values, index):
    return values.new_empty((index.shape[0], *values.shape[1:]))


def _run_gather_bwd(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    return _implementation(grad).gather_rows_backward(grad, index, rows)


def _fake_gather_bwd(grad, index, rows):
    return grad.new_empty((rows, *grad.shape[1:]))


def _save_gather(ctx, inputs, output):
    values, index = inputs
    ctx.save_for_backward(index)
    ctx.rows = values.shape[0]


_gather_bwd = define("gather_rows_bwd", _run_gather_bwd, _fake_gather_bwd)
_gather = define("gather_rows", _run_gather, _fake_gather, _save_gather, lambda ctx, grad: (
    _gather_bwd(grad, *ctx.saved_tensors, ctx.rows), None))


def broadcast_add(values: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    """`values[t] + dense[sample of t]`: `[T, ...]` plus `[B, ...]`. The gradient of `dense` sums each sample's rows."""
    check_same("broadcast_add", values=values, dense=dense)
    if dense.shape != (offsets.shape[0] - 1, *values.shape[1:]):
        raise ValueError(
            f"broadcast_add: dense must be {[offsets.shape[0] - 1, *values.shape[1:]]}, got {list(dense.shape)}"
        )
    check_offsets("broadcast_add", offsets, values.shape[0], values.device)
    return _broadcast_add(values, dense, offsets)


def _run_broadcast_add(values: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    return _implementation(values).broadcast_add(values, dense, offsets)


def _fake_broadcast_add(values, dense, offsets):
    return values.new_empty(values.shape)


def _run_segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    return _implementation(values).segment_sum(values, offsets)


def _fake_segment_sum(values, offsets):
    return values.new_empty((offsets.shape[0] - 1, *values.shape[1:]))


def _save_offsets(ctx, inputs, output):
    ctx.save_for_backward(inputs[-1])


_segment_sum = define("segment_sum", _run_segment_sum, _fake_segment_sum)
_broadcast_add = define("broadcast_add", _run_broadcast_add, _fake_broadcast_add, _save_offsets, lambda ctx, grad: (
    grad, _segment_sum(grad, *ctx.saved_tensors), None))


# ---- jagged x dense product --------------------------------------------------------------------------------------


def jagged_dense_bmm(values: Tensor, dense: Tensor, offsets: Tensor, *, max_length: int,
                     bias: Tensor | None = None) -> Tensor:
    """`values[t] @ dense[b] + bias[b]`, b the sample of row t: `[T, K]`, `[B, K, N]`, `[B, N]` to `[T, N]`.

    Accumulates in fp32 or wider. max_length: host bound of the sample lengths.
    """
    batch = offsets.shape[0] - 1
    if values.dim() != 2 or dense.dim() != 3 or dense.shape[:2] != (batch, values.shape[1]):
        raise ValueError(
            f"jagged_dense_bmm: wanted values [T, K] and dense [{batch}, K, N], got {list(values.shape)} and "
            f"{list(dense.shape)}"
        )
    check_same("jagged_dense_bmm", values=values, dense=dense)
    check_offsets("jagged_dense_bmm", offsets, values.shape[0], values.device, max_length)
    out = _bmm(values, dense, offsets, max_length)
    return out if bias is None else broadcast_add(out, bias, offsets)


def _run_bmm(values: Tensor, dense: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    return _implementation(values).jagged_dense_bmm(values, dense, offsets, max_length)


def _fake_bmm(values, dense, offsets, max_length):
    return values.new_empty((values.shape[0], dense.shape[2]))


def _run_bmm_bwd(grad: Tensor, values: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    return _implementation(values).jagged_dense_bmm_backward(grad, values, offsets, max_length)


def _fake_bmm_bwd(grad, values, offsets, max_length):
    return values.new_empty((offsets.shape[0] - 1, values.shape[1], grad.shape[1]))


def _save_bmm(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.max_length = inputs[3]


def _gradient_bmm(ctx, grad):
    values, dense, offsets = ctx.saved_tensors
    grad_values = _bmm(grad, dense.transpose(1, 2), offsets, ctx.max_length)
    return grad_values, _bmm_bwd(grad, values, offsets, ctx.max_length), None, None


_bmm = define("jagged_dense_bmm", _run_bmm, _fake_bmm, _save_bmm, _gradient_bmm)
_bmm_bwd = define("jagged_dense_bmm_bwd", _run_bmm_bwd, _fake_bmm_bwd)


@register_flop_formula(torch.ops.opengem.jagged_dense_bmm)
def _bmm_flops(values, dense, offsets, max_length, *args, out_shape=None, **kwargs) -> int:
    return 2 * values[0] * values[1] * dense[2]


@register_flop_formula(torch.ops.opengem.jagged_dense_bmm_bwd)
def _bmm_backward_flops(grad, values, offsets, max_length, *args, out_shape=None, **kwargs) -> int:
    return 2 * values[0] * values[1] * grad[1]
