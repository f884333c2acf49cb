"""`average_and_count`: flash attention in some heads, sums weighted by `relu(q kᵀ)` in the others, over one buffer.

Both are other ops (`jfa`, `gdpa`). One op around them, because keys and values of both kinds come from one projection:
its gradient is made in one buffer, by the kernels, where two ops would return four tensors to be joined.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import opengem.kernels.gdpa.op  # noqa: F401 (defines the ops called below, and so does what it imports)
from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.jfa import cost
from opengem.kernels.jfa.reference import Options


def average_and_count(q: Tensor, kv: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, max_q: int, max_kv: int,
                      counting: int) -> tuple[Tensor, Tensor]:
    """(averages `[Tq, H - counting, D]`, sums `[Tq, counting, D]`) of each sample's keys by its queries.

    q `[Tq, H, D]`, kv `[Tkv, 2 H, D]`, keys before values, one dtype; the last `counting` heads of each count, 0 <
    counting < H. The rest as in `jagged_flash_attention` and `gdpa`, with scale `D ** -0.5`.
    Raises ValueError for other shapes.
    """
    heads = q.shape[1] if q.dim() == 3 else 0
    if kv.dim() != 3 or kv.shape[1:] != (2 * heads, q.shape[-1]) or not 0 < counting < heads:
        raise ValueError(f"average_and_count: q must be [Tq, H, D], kv [Tkv, 2 H, D], 0 < counting < H; got "
                         f"{list(q.shape)}, {list(kv.shape)}, {counting}")  # fmt: skip
    averages, _, sums = _forward(q, kv, q_offsets, kv_offsets, max_q, max_kv, counting)
    return averages, sums


def _split(x: Tensor, counting: int) -> tuple[Tensor, Tensor]:
    return x.split([x.shape[1] - counting, counting], 1)


def _heads(q: Tensor, kv: Tensor, counting: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of the heads that average, then of those that count."""
    k, v = kv.chunk(2, 1)
    return list(zip(_split(q, counting), _split(k, counting), _split(v, counting), strict=True))


def _run_forward(q: Tensor, kv: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int,
                 counting: int) -> tuple[Tensor, Tensor, Tensor]:
    average, count = _heads(q, kv, counting)
    scale = q.shape[2] ** -0.5
    out, lse = torch.ops.opengem.jfa_fwd(*average, q_offsets, kv_offsets, None, False, max_q, max_kv, scale, -1, -1)
    none = kv_offsets.new_empty(0, dtype=torch.int32)
    return out, lse, torch.ops.opengem.gdpa_fwd(
        *count, q_offsets, kv_offsets, none, max_q, max_kv, "relu", scale, False)


def _fake_forward(q, kv, q_offsets, kv_offsets, max_q, max_kv, counting):
    average, count = _split(q, counting)
    lse = q.new_empty(average.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return average.new_empty(average.shape), lse, count.new_empty(count.shape)


def _run_backward(
    grad_averages: Tensor, grad_sums: Tensor, q: Tensor, kv: Tensor, averages: Tensor, lse: Tensor, q_offsets: Tensor,
    kv_offsets: Tensor, max_q: int, max_kv: int, counting: int) -> tuple[Tensor, Tensor]:
    average, count = _heads(q, kv, counting)
    dq, dkv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    (dq_average, *room), (dq_count, *room_count) = _heads(dq, dkv, counting)
    scale = q.shape[2] ** -0.5
    saved = grad_averages, None, *average, averages, lse, q_offsets, kv_offsets, None
    facts = {"dtype": q.dtype, "head_dim": q.shape[2], "bias": "none", "step": "backward"}
    if backend.implementation("jfa", q.device, **facts) == "gluon":
        from opengem.kernels.jfa import gluon_sm90_backward

        found = gluon_sm90_backward.backward(*saved, max_q, max_kv, Options(scale), room=room)
    else:
        found = torch.ops.opengem.jfa_bwd(*saved, False, max_q, max_kv, scale, -1, -1)
    none = kv_offsets.new_empty(0, dtype=torch.int32)
    counted = torch.ops.opengem.gdpa_bwd(
        grad_sums, *count, q_offsets, kv_offsets, none, max_q, max_kv, "relu", scale, False)
    for own, grad in zip((dq_average, *room, dq_count, *room_count), (*found[:3], *counted), strict=True):
        if own.data_ptr() != grad.data_ptr() or own.stride() != grad.stride():
            own.copy_(grad)
    return dq, dkv


def _fake_backward(grad_averages, grad_sums, q, kv, *_):
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save(ctx, inputs, output):
    q, kv, q_offsets, kv_offsets, *ctx.options = inputs
    averages, lse, _ = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, kv, averages, lse, q_offsets, kv_offsets)


def _gradient(ctx, grad_averages, _, grad_sums):
    return *_backward(grad_averages, grad_sums, *ctx.saved_tensors, *ctx.options), *[None] * 5


_forward = define("pool_fwd", _run_forward, _fake_forward, _save, _gradient)
_backward = define("pool_bwd", _run_backward, _fake_backward)


@register_flop_formula(torch.ops.opengem.pool_fwd, get_raw=True)
def _forward_flops(q, kv, q_offsets, kv_offsets, *_, **__) -> int:
    return cost.flops(q_offsets.diff(), kv_offsets.diff(), q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.opengem.pool_bwd, get_raw=True)
def _backward_flops(grad_averages, grad_sums, q, kv, averages, lse, *offsets, **_) -> int:
    return cost.backward_flops(_forward_flops(q, kv, *offsets), recompute=False)
