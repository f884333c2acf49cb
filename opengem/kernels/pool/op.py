"""Pooling of histories by seeds: `modulated_norm` makes the queries, `average_and_count` attends with them.

`average_and_count` is two other ops, `jfa` and `gdpa`, each on its heads. It is one op because keys and values of both
come from one projection: their gradient is made in one buffer, by the kernels, where two ops would return four tensors
to be joined.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from opengem.kernels import backend
from opengem.kernels.copy import put
from opengem.kernels.custom_op import define
from opengem.kernels.gdpa import op as gdpa
from opengem.kernels.jfa import cost
from opengem.kernels.jfa import op as jfa
from opengem.kernels.jfa.reference import Options
from opengem.kernels.pool import reference


def average_and_count(q: Tensor, kv: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, max_q: int, max_kv: int,
                      counting: int) -> Tensor:
    """`[Tq, H, D]`: each sample's values averaged by softmax in the first heads, counted in the last `counting`.

    A head that counts gives `sign(s) log(1 + |s|)` of the sums s of `relu(scale q kᵀ) v`. q `[Tq, H, D]`, kv
    `[Tkv, 2 H, D]`, keys before values, of one dtype; 0 < counting < H. scale is `D ** -0.5`; the rest as in
    `jagged_flash_attention` and `gdpa`. A query without keys gets 0. Raises ValueError for other shapes.
    """
    heads = q.shape[1] if q.dim() == 3 else 0
    if kv.dim() != 3 or kv.shape[1:] != (2 * heads, q.shape[-1]) or not 0 < counting < heads:
        raise ValueError(f"average_and_count: q must be [Tq, H, D], kv [Tkv, 2 H, D], 0 < counting < H; got "
                         f"{list(q.shape)}, {list(kv.shape)}, {counting}")  # fmt: skip
    return _forward(q, kv, q_offsets, kv_offsets, max_q, max_kv, counting)[0]


def modulated_norm(seed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`layer_norm(seed * (1 + scale[b]) + shift[b])` for each sample b: `[S, d]`, `[B, d]`, `[B, d]` to `[B, S, d]`.

    One dtype, computed in fp32 or wider. An adaptive norm, as in Peebles and Xie, "Scalable Diffusion Models with
    Transformers". Raises ValueError for other shapes.
    """
    if seed.dim() != 2 or scale.shape != shift.shape or scale.dim() != 2 or scale.shape[1] != seed.shape[1]:
        raise ValueError(f"modulated_norm: seed must be [S, d], scale and shift [B, d]; got {list(seed.shape)}, "
                         f"{list(scale.shape)}, {list(shift.shape)}")  # fmt: skip
    return _modulate(seed, scale, shift)


def _around(x: Tensor, width: int):
    """The module that does what stands around the attention."""
    if backend.implementation("pool", x.device, dtype=x.dtype, width=width) == "reference":
        return reference
    from opengem.kernels.pool import triton

    return triton


# ---- attention ---------------------------------------------------------------------------------------------------


def _heads(q: Tensor, kv: Tensor, counting: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of the heads that average, then of those that count."""
    kinds = q.shape[1] - counting, counting
    return list(zip(*(x.split(kinds, 1) for x in (q, *kv.chunk(2, 1))), strict=True))


def _run_forward(q: Tensor, kv: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int,
                 counting: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    average, count = _heads(q, kv, counting)
    scale = q.shape[2] ** -0.5
    rows = q_offsets, kv_offsets
    averages, lse = jfa.forward(*average, *rows, None, False, max_q, max_kv, scale, -1, -1)
    sums = gdpa.forward(*count, *rows, None, max_q, max_kv, "relu", scale, False)
    return _around(q, q.shape[1] * q.shape[2]).join(averages, sums), averages, lse, sums


def _fake_forward(q, kv, q_offsets, kv_offsets, max_q, max_kv, counting):
    rows, heads, dim = q.shape
    lse = q.new_empty(heads - counting, rows, dtype=torch.promote_types(q.dtype, torch.float32))
    return (q.new_empty(rows, heads, dim), q.new_empty(rows, heads - counting, dim), lse,
            q.new_empty(rows, counting, dim))  # fmt: skip


def _run_backward(
    grad: Tensor, q: Tensor, kv: Tensor, averages: Tensor, lse: Tensor, sums: Tensor, q_offsets: Tensor,
    kv_offsets: Tensor, max_q: int, max_kv: int, counting: int) -> tuple[Tensor, Tensor]:
    average, count = _heads(q, kv, counting)
    dq, dkv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    (dq_average, *room), (dq_count, *room_count) = _heads(dq, dkv, counting)
    scale = q.shape[2] ** -0.5
    saved = grad[:, : averages.shape[1]], None, *average, averages, lse, q_offsets, kv_offsets, None
    facts = {"dtype": q.dtype, "head_dim": q.shape[2], "bias": "none"}
    if backend.implementation("jfa", q.device, **facts) == "gluon":
        from opengem.kernels.jfa import gluon_sm90_backward

        found = gluon_sm90_backward.backward(*saved, max_q, max_kv, Options(scale), room=room)
    else:
        found = jfa.backward(*saved, False, max_q, max_kv, scale, -1, -1)
    of_sums = _around(q, q.shape[1] * q.shape[2]).split(grad, sums)
    counted = gdpa.backward(of_sums, *count, q_offsets, kv_offsets, None, max_q, max_kv, "relu", scale, False)
    for own, made in zip((dq_average, *room, dq_count, *room_count), (*found[:3], *counted), strict=True):
        if own.data_ptr() != made.data_ptr() or own.stride() != made.stride():
            put(own, made)
    return dq, dkv


def _fake_backward(grad, q, kv, *_):
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save(ctx, inputs, output):
    q, kv, q_offsets, kv_offsets, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, kv, *output[1:], q_offsets, kv_offsets)


def _gradient(ctx, grad, *_):
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5


_forward = define("pool_fwd", _run_forward, _fake_forward, _save, _gradient)
_backward = define("pool_bwd", _run_backward, _fake_backward)


@register_flop_formula(torch.ops.opengem.pool_fwd, get_raw=True)
def _forward_flops(q, kv, q_offsets, kv_offsets, *_, **__) -> int:
    return cost.flops(q_offsets.diff(), kv_offsets.diff(), q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.opengem.pool_bwd, get_raw=True)
def _backward_flops(grad, q, kv, averages, lse, sums, *offsets, **_) -> int:
    return cost.backward_flops(_forward_flops(q, kv, *offsets), recompute=False)


# ---- seeds -------------------------------------------------------------------------------------------------------


def _run_modulate(seed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _around(seed, seed.shape[1]).modulate(seed, scale, shift)


def _run_modulate_backward(grad: Tensor, seed: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _around(seed, seed.shape[1]).modulate_backward(grad, seed, scale, shift)


def _fake_modulate(seed, scale, shift):
    return seed.new_empty(scale.shape[0], *seed.shape)


def _fake_modulate_backward(grad, seed, scale, shift):
    return seed.new_empty(seed.shape), scale.new_empty(scale.shape), shift.new_empty(shift.shape)


def _save_modulate(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient_modulate(ctx, grad):
    return _modulate_backward(grad, *ctx.saved_tensors)


_modulate = define("modulate_fwd", _run_modulate, _fake_modulate, _save_modulate, _gradient_modulate)
_modulate_backward = define("modulate_bwd", _run_modulate_backward, _fake_modulate_backward)
