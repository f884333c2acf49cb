"""`jagged_flash_attention`: the public function and its custom ops, with checks, autograd and FLOP formulas."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.jfa import cost, reference
from opengem.kernels.jfa.reference import Options

_OFFSETS = torch.int32, torch.int64


@dataclass(frozen=True)
class PairBias:
    """One additive bias per head, query and key. `values` `[H, sum_b q_b * kv_b]`: each sample's matrix, row-major."""

    values: Tensor


@dataclass(frozen=True)
class RelativeBias:
    """One additive bias per head and distance, shared by all samples. `table` `[H, 2 * radius + 1]`.

    The score of a query at position p and a key at position j gets `table[h, clamp(j - p, -radius, radius) + radius]`;
    positions are aligned as for `causal`.
    """

    table: Tensor


def jagged_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor | None = None, *,
    max_q: int, max_kv: int | None = None, scale: float | None = None, causal: bool = False,
    window: tuple[int, int] | None = None, bias: PairBias | RelativeBias | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q kᵀ + bias) v within each sample of a jagged batch (FlashAttention, arXiv 2205.14135).

    q `[Tq, H, D]`, k and v `[Tkv, Hkv, D]` of one dtype (bf16, fp16, fp32, fp64), H a multiple of Hkv: query head h
    reads key head `h // (H / Hkv)`. They may be strided views of one buffer. `q_offsets` and `kv_offsets` (same by
    default) int32 or int64 `[B + 1]`, on the same device, from 0 to Tq and Tkv; `max_q`, `max_kv`: host ints, no
    sample is longer. `scale` defaults to `1 / sqrt(D)`.

    `causal` and `window` count positions aligned at the end of the sample (as FlashAttention 2.1 and later): query i
    of m stands at position `i + n - m` among n keys. It sees keys from `left` before to `right` after its position, its
    own included; -1 is no limit; causal means right = 0.

    Returns `out` `[Tq, H, D]`, with `return_lse` also the log-sum-exp of the scores `[H, Tq]` (fp32, natural log),
    both differentiable in q, k, v and the bias. A query that sees no key gets output 0, log-sum-exp -inf, gradient 0.
    An empty batch and empty samples are ordinary input. Rows behind `offsets[-1]` are a ValueError on a CPU; on a GPU,
    where looking would stall the queue, they get output and gradient 0. The result of a sample does not depend on the
    others, and equal inputs give equal bits, forward and backward.
    """
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    max_kv = max_q if max_kv is None else max_kv
    left, right = cost.normalise_window(causal, window)
    values, relative = _bias_tensor(bias, q.shape[1] if q.dim() == 3 else 0)
    _check(q, k, v, q_offsets, kv_offsets, max_q, max_kv, left, right, values)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}; negate q instead of the scale")
    out, lse = forward(q, k, v, q_offsets, kv_offsets, values, relative, max_q, max_kv, scale, left, right)
    return (out, lse) if return_lse else out


# ---- custom ops ------------------------------------------------------------------------------------------------


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, relative: bool,
    max_q: int, max_kv: int, scale: float, left: int, right: int,
) -> tuple[Tensor, Tensor]:
    kernels = _kernels(q, bias, relative, "forward")
    _check_offsets(q, k, q_offsets, kv_offsets, max_q, max_kv, None if relative else bias)
    options = Options(scale, left, right, bias is not None and not relative, relative)
    return kernels.forward(q, k, v, q_offsets, kv_offsets, bias, max_q, max_kv, options)


def _fake_forward(q, *_):
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], q.shape[0], dtype=wide)


def _run_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor,
    kv_offsets: Tensor, bias: Tensor | None, relative: bool, max_q: int, max_kv: int, scale: float, left: int,
    right: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = _kernels(q, bias, relative, "backward")
    options = Options(scale, left, right, bias is not None and not relative, relative)
    return kernels.backward(dout, dlse, q, k, v, out, lse, q_offsets, kv_offsets, bias, max_q, max_kv, options)


def _fake_backward(dout, dlse, q, k, v, out, lse, q_offsets, kv_offsets, bias, *_):
    dense = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return *dense, q.new_empty(0 if bias is None else bias.shape, dtype=q.dtype if bias is None else bias.dtype)


def _save(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, bias, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, q_offsets, kv_offsets, bias)


def _gradient(ctx, dout, dlse):
    q, k, v, out, lse, q_offsets, kv_offsets, bias = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias = backward(dout, dlse, q, k, v, out, lse, q_offsets, kv_offsets, bias, *ctx.options)
    return dq, dk, dv, None, None, None if bias is None else dbias, *[None] * len(ctx.options)


forward = define("jfa_fwd", _run_forward, _fake_forward, _save, _gradient)
backward = define("jfa_bwd", _run_backward, _fake_backward)


def _kernels(q: Tensor, bias: Tensor | None, relative: bool, step: str):
    """The module that runs `step` ("forward" or "backward") of these inputs."""
    kind = "none" if bias is None else "relative" if relative else "pair"
    facts = {"dtype": q.dtype, "head_dim": q.shape[2], "bias": kind}
    chosen = backend.implementation("jfa", q.device, **facts)
    return reference if chosen == "reference" else _module(chosen, step)


@functools.cache
def _module(chosen: str, step: str):
    if chosen == "triton":
        from opengem.kernels.jfa import triton

        return triton
    from opengem.kernels.jfa import gluon_sm90, gluon_sm90_backward

    return gluon_sm90 if step == "forward" else gluon_sm90_backward


# ---- useful FLOPs ----------------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.opengem.jfa_fwd, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, bias, relative, max_q, max_kv, scale, left, right, **_) -> int:
    """Reads the lengths where they are real; of fake tensors it only knows the mean, and takes all samples as equal."""
    heads, dim, batch = q.shape[1], q.shape[2], q_offsets.shape[0] - 1
    if isinstance(q_offsets, torch._subclasses.FakeTensor) or q_offsets.is_meta:
        lengths = [[x.shape[0] // batch] * batch if batch else [] for x in (q, k)]
    else:
        lengths = [q_offsets.diff(), kv_offsets.diff()]
    return cost.flops(*lengths, heads, dim, window=(left, right))


@register_flop_formula(torch.ops.opengem.jfa_bwd, get_raw=True)
def _backward_flops(dout, dlse, q, k, v, out, lse, *rest, **_) -> int:
    return cost.backward_flops(_forward_flops(q, k, v, *rest), recompute=False)


# ---- checks ----------------------------------------------------------------------------------------------------


def _bias_tensor(bias: PairBias | RelativeBias | None, heads: int) -> tuple[Tensor | None, bool]:
    if bias is None:
        return None, False
    if not isinstance(bias, PairBias | RelativeBias):
        raise ValueError(f"bias must be PairBias(values), RelativeBias(table) or None, got {type(bias).__name__}")
    relative = isinstance(bias, RelativeBias)
    tensor = bias.table if relative else bias.values
    if tensor.dim() != 2 or tensor.shape[0] != heads:
        raise ValueError(f"bias must have one row per query head [{heads}, ...], got {list(tensor.shape)}")
    if relative and tensor.shape[1] % 2 == 0:
        raise ValueError(f"RelativeBias.table must have 2 * radius + 1 columns, an odd number, got {tensor.shape[1]}")
    return tensor, relative


def _check(q, k, v, q_offsets, kv_offsets, max_q, max_kv, left, right, bias) -> None:
    """ValueError for what does not fit; a call that does fit pays for one expression."""
    shape, partner, offsets, device = q.shape, k.shape, q_offsets.shape, q.device
    if not (
        len(shape) == 3 == len(partner) and partner == v.shape and 0 < shape[2] == partner[2] and partner[1] > 0
        and shape[1] % partner[1] == 0 and q.dtype == k.dtype == v.dtype and q.is_floating_point()
        and len(offsets) == 1 and offsets[0] > 0 and offsets == kv_offsets.shape and q_offsets.dtype in _OFFSETS
        and kv_offsets.dtype in _OFFSETS and k.device == v.device == q_offsets.device == kv_offsets.device == device
        and max_q >= 0 <= max_kv and left >= -1 <= right and bias is None
    ):
        _explain(q, k, v, q_offsets, kv_offsets, max_q, max_kv, left, right, bias)


def _explain(q, k, v, q_offsets, kv_offsets, max_q, max_kv, left, right, bias) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [rows, heads, head_dim], got {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device or not x.is_floating_point():
            wanted, got = f"{q.dtype} on {q.device}", f"{x.dtype} on {x.device}"
            raise ValueError(f"{name} must be a float tensor like q ({wanted}), got {got}")
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise ValueError(f"k and v must be [Tkv, Hkv, {q.shape[2]}], got {list(k.shape)} and {list(v.shape)}")
    if q.shape[2] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, k has {k.shape[1]}; the first must be a multiple of the second")
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if offsets.dim() != 1 or offsets.dtype not in _OFFSETS or offsets.shape[0] == 0:
            raise ValueError(f"{name} must be int32 or int64 [B + 1], got {offsets.dtype} {list(offsets.shape)}")
        if offsets.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {offsets.device}")
    if q_offsets.shape != kv_offsets.shape:
        raise ValueError(f"kv_offsets: expected {len(q_offsets)} offsets as in q_offsets, got {len(kv_offsets)}")
    if max_q < 0 or max_kv < 0:
        raise ValueError(f"max_q and max_kv must be >= 0, got {max_q} and {max_kv}")
    if left < -1 or right < -1:
        raise ValueError(f"window must be (left, right), each >= 0 or -1 for no limit, got {(left, right)}")
    if bias is not None and (bias.device != q.device or not bias.is_floating_point()):
        raise ValueError(f"bias must be a float tensor on {q.device}, got {bias.dtype} on {bias.device}")


def _check_offsets(q, k, q_offsets, kv_offsets, max_q, max_kv, pair: Tensor | None) -> None:
    """What only the contents of the offsets tell; read on a CPU alone, where it costs no stall."""
    if q.device.type != "cpu":
        return
    check_host_offsets("jagged_flash_attention", "q", q_offsets, q.shape[0], max_q)
    check_host_offsets("jagged_flash_attention", "kv", kv_offsets, k.shape[0], max_kv)
    if pair is not None:
        cells = int((q_offsets.diff().long() * kv_offsets.diff().long()).sum())
        if pair.shape[1] != cells:
            raise ValueError(f"PairBias.values must have sum of q_b * kv_b = {cells} columns, got {pair.shape[1]}")


def check_host_offsets(op: str, name: str, offsets: Tensor, rows: int, longest: int) -> None:
    """ValueError unless `offsets` (on a CPU) run from 0 to `rows` in steps of 0 to `longest`."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != rows:
        raise ValueError(
            f"{op}: {name} has {rows} rows, {name}_offsets run from {first} to {last}; cut the rows or mend them")
    lengths = offsets.diff()
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > longest):
        raise ValueError(
            f"{op}: {name}_offsets have lengths from {int(lengths.min())} to {int(lengths.max())} (sample "
            f"{int(lengths.argmax())}), wanted 0 to {longest} (max_{name}); mend the offsets or raise the maximum")
