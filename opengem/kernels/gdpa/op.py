"""`gdpa`: the public function, its checks, and the custom ops behind it.

One function serves self-attention (`kv_offsets` left out), cross-attention (long queries, short keys) and pooling by
learned seeds (`shared_q=True`). Used by `model/attention.py`; defined by `reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.gdpa import cost, reference
from opengem.kernels.gdpa.activations import ACTIVATIONS, TAYLOR_LIMIT
from opengem.kernels.jfa.op import check_host_offsets

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OFFSETS = (torch.int32, torch.int64)


def gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None = None, *, max_q: int,
    max_kv: int | None = None, activation: str = "gelu", scale: float = 1.0, shared_q: bool = False,
    schedule: Tensor | None = None) -> Tensor:
    """Generalised dot-product attention, `act(q kᵀ · scale) v` inside each sample of a jagged batch.

    q: `[Tq, H, D]`; k, v: `[Tkv, H, D]`; bf16, fp16, fp32 or fp64 of one dtype and device; any strides.
    q_offsets, kv_offsets: int32 or int64 `[B + 1]`, from 0 to the number of rows. Without `kv_offsets` the keys have
        the offsets of the queries (self-attention).
    max_q, max_kv: host ints, upper bounds of the lengths; they size grids and never enter the result. `max_kv` may be
        left out together with `kv_offsets`.
    activation: gelu (erf), gelu_tanh, gelu_poly (clamped polynomial), gelu_taylor6, silu, relu, relu2, leaky_relu
        (slope 0.01), hardswish, identity.
    scale: a constant factor on the scores (a temperature is `1 / scale`).
    shared_q: q is `[S, H, D]`, the same S queries for every sample (learned seeds). `q_offsets` is then None or
        `arange(B + 1) * S`, and `kv_offsets` is needed.
    schedule: what `gdpa_schedule` made for these very offsets, to be shared by layers; made here if left out.

    `gelu_taylor6` is a series that diverges outside |x| <= 1.25. Its precondition is part of the op: rows of q and k
    are L2-normalised first, so that |scores| <= |scale|, and |scale| must be at most 1.25.

    Returns `[Tq, H, D]` (`[B * S, H, D]` with shared_q) in the dtype of q. A query without keys gets 0 and gradient 0.
    An empty batch (`offsets == [0]`) gives no rows. A sample's rows depend on that sample alone, and the same inputs
    give the same bits. On a CPU offsets are checked; on a GPU they are trusted (a check would stop the stream) and rows
    past the last offset are 0 in the output and in every gradient.
    Raises ValueError for shapes, dtypes, devices, options or (on a CPU) offsets that do not fit together.
    Source: the GDPA block of Kunlun (arXiv 2602.10016); softmax-free attention as in HSTU (arXiv 2402.17152).
    """
    q_offsets, kv_offsets, max_kv = _complete(q, q_offsets, kv_offsets, max_q, max_kv, shared_q)
    _check_tensors(q, k, v, q_offsets, kv_offsets, shared_q)
    _check_options(activation, scale)
    if activation == "gelu_taylor6":
        q, k = _normalised(q), _normalised(k)
    if schedule is None:  # made here, so that the backward has it too
        schedule = _dealt(q, k, q_offsets, kv_offsets, max_q, shared_q)
    return forward(q, k, v, q_offsets, kv_offsets, schedule, max_q, max_kv, activation, float(scale), shared_q)


def gdpa_schedule(
    q: Tensor, k: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None = None, *, max_q: int,
    shared_q: bool = False,
) -> Tensor:
    """The tiles of a jagged batch, longest work first: int32, made on the device without a host sync.

    Arguments as in `gdpa` (of q and k only the shapes matter). Give the result to every `gdpa` call of the step that
    has the same offsets, `max_q`, row counts and head dimension; a call with other sizes is refused.
    """
    q_offsets, kv_offsets, _ = _complete(q, q_offsets, kv_offsets, max_q, 0, shared_q)
    _check_tensors(q, k, k, q_offsets, kv_offsets, shared_q)
    return _dealt(q, k, q_offsets, kv_offsets, max_q, shared_q)


@torch.no_grad()
def _dealt(q, k, q_offsets, kv_offsets, max_q, shared_q) -> Tensor:
    return _schedule(q, k, q_offsets, kv_offsets, max_q, shared_q)


def _normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) if x.dtype == torch.float64 else F.normalize(x.float(), dim=-1).to(x.dtype)


# ---- checks ------------------------------------------------------------------------------------------------------


def _complete(q, q_offsets, kv_offsets, max_q, max_kv, shared_q):
    """Fill in what may be left out: keys like queries, and the offsets of shared queries."""
    if shared_q:
        if kv_offsets is None:
            raise ValueError("gdpa: shared_q=True needs kv_offsets [B + 1] (the shared queries attend to them)")
        if max_q != q.shape[0]:
            raise ValueError(f"gdpa: shared_q=True wants max_q == q.shape[0] == {q.shape[0]}, got {max_q}")
        if q_offsets is None:
            q_offsets = kv_offsets.new_empty(0)
    elif q_offsets is None:
        raise ValueError("gdpa: q_offsets is None; give int offsets [B + 1] (only shared_q=True can do without)")
    if kv_offsets is None:
        return q_offsets, q_offsets, max_q if max_kv is None else max_kv
    if max_kv is None:
        raise ValueError("gdpa: max_kv is missing; with kv_offsets give the longest key length as a host int")
    return q_offsets, kv_offsets, max_kv


def _check_tensors(q, k, v, q_offsets, kv_offsets, shared_q) -> None:
    """ValueError for what does not fit; a call that does fit pays for one expression."""
    shape, partner, device = q.shape, k.shape, q.device
    if not (
        len(shape) == 3 == len(partner) and partner == v.shape and shape[1:] == partner[1:]
        and q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES
        and k.device == v.device == q_offsets.device == kv_offsets.device == device
        and q_offsets.dtype in _OFFSETS and kv_offsets.dtype in _OFFSETS and q_offsets.dim() == 1
        and kv_offsets.dim() == 1 and kv_offsets.shape[0] > 0
        and (q_offsets.shape == kv_offsets.shape or (shared_q and q_offsets.shape[0] == 0))
    ):
        _explain(q, k, v, q_offsets, kv_offsets)


def _explain(q, k, v, q_offsets, kv_offsets) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(f"gdpa: q and k must be [T, H, D], got {list(q.shape)} and {list(k.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"gdpa: k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[1:] != k.shape[1:]:
        raise ValueError(f"gdpa: q and k must agree in [H, D], got {list(q.shape[1:])} and {list(k.shape[1:])}")
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
        raise ValueError(
            f"gdpa: q, k, v must share one of bf16, fp16, fp32, fp64, got {q.dtype}, {k.dtype}, {v.dtype}; cast first"
        )
    for name, tensor in (("k", k), ("v", v), ("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if tensor.device != q.device:
            raise ValueError(f"gdpa: {name} is on {tensor.device}, q on {q.device}; move all to one device")
        if name.endswith("offsets") and (tensor.dim() != 1 or tensor.dtype not in _OFFSETS):
            raise ValueError(f"gdpa: {name} must be int32 or int64 [B + 1], got {tensor.dtype} {list(tensor.shape)}")
    if kv_offsets.shape[0] < 1:
        raise ValueError("gdpa: offsets must have shape [B + 1] with B >= 0, got [0]; an empty batch has offsets [0]")
    raise ValueError(f"gdpa: expected {len(q_offsets)} kv_offsets (as q_offsets has), got {len(kv_offsets)}")


def _check_options(activation: str, scale: float) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"gdpa: activation {activation!r} is unknown, wanted one of {', '.join(ACTIVATIONS)}")
    if activation == "gelu_taylor6" and abs(scale) > TAYLOR_LIMIT:
        raise ValueError(
            f"gdpa: gelu_taylor6 holds for |scale| <= {TAYLOR_LIMIT} (q and k are normalised), got scale={scale}; "
            "lower it or use gelu_poly"
        )


def _check_contents(q, k, q_offsets, kv_offsets, max_q, max_kv, shared_q):
    """Offsets against rows and maxima, where they lie on the host."""
    check_host_offsets("gdpa", "kv", kv_offsets, k.shape[0], max_kv)
    if not shared_q:
        check_host_offsets("gdpa", "q", q_offsets, q.shape[0], max_q)
    elif q_offsets.shape[0] and bool((q_offsets.diff() != q.shape[0]).any()):
        raise ValueError(f"gdpa: with shared_q=True q_offsets must be None or arange(B + 1) * {q.shape[0]}")


# ---- custom ops --------------------------------------------------------------------------------------------------


def _implementation(q: Tensor, activation: str = "gelu", shared_q: bool = False) -> str:
    facts = {"dtype": q.dtype, "head_dim": q.shape[2], "activation": activation, "shared_q": shared_q}
    return backend.implementation("gdpa", q.device, **facts)


def _schedule_size(q: Tensor, k: Tensor, kv_offsets: Tensor, shared_q: bool) -> int:
    """Three counts, and four numbers for each tile there can be (query tiles have 128 rows, key tiles at least 64)."""
    batch = kv_offsets.shape[0] - 1
    q_rows = batch * q.shape[0] if shared_q else q.shape[0]
    return 4 + 4 * ((q_rows + 127) // 128 + 2 * ((k.shape[0] + 63) // 64) + 4 * batch)


def _run_schedule(q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q: int, shared_q: bool) -> Tensor:
    size = _schedule_size(q, k, kv_offsets, shared_q)
    if _implementation(q) == "reference":
        return kv_offsets.new_zeros(size, dtype=torch.int32)
    from opengem.kernels.gdpa import launch

    return launch.deal(q, k, q_offsets, kv_offsets, size, max_q, shared_q)


def _fake_schedule(q, k, q_offsets, kv_offsets, max_q, shared_q):
    return kv_offsets.new_empty(_schedule_size(q, k, kv_offsets, shared_q), dtype=torch.int32)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, schedule: Tensor | None, max_q: int,
    max_kv: int, activation: str, scale: float, shared_q: bool,
) -> Tensor:
    if q.device.type == "cpu":
        _check_contents(q, k, q_offsets, kv_offsets, max_q, max_kv, shared_q)
    options = (max_q, max_kv, activation, scale, shared_q)
    implementation = _implementation(q, activation, shared_q)
    if implementation == "reference":
        return reference.forward(q, k, v, q_offsets, kv_offsets, *options)
    from opengem.kernels.gdpa import launch

    schedule = _schedule_of(q, k, q_offsets, kv_offsets, schedule, max_q, shared_q)
    return launch.forward(q, k, v, q_offsets, kv_offsets, schedule, *options, gluon=implementation == "gluon")


def _schedule_of(q, k, q_offsets, kv_offsets, schedule, max_q, shared_q) -> Tensor:
    if schedule is None:
        return _run_schedule(q, k, q_offsets, kv_offsets, max_q, shared_q)
    size = _schedule_size(q, k, kv_offsets, shared_q)
    if schedule.numel() != size:
        raise ValueError(f"gdpa: the schedule has {schedule.numel()} elements, wanted {size}; make it for these sizes")
    return schedule


def _fake_forward(q, k, v, q_offsets, kv_offsets, schedule, max_q, max_kv, activation, scale, shared_q):
    rows = (kv_offsets.shape[0] - 1) * q.shape[0] if shared_q else q.shape[0]
    return q.new_empty(rows, q.shape[1], q.shape[2])


def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    schedule: Tensor | None, max_q: int, max_kv: int, activation: str, scale: float, shared_q: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (max_q, max_kv, activation, scale, shared_q)
    implementation = _implementation(q, activation, shared_q)
    if implementation == "reference":
        return reference.backward(grad, q, k, v, q_offsets, kv_offsets, *options)
    from opengem.kernels.gdpa import launch

    schedule = _schedule_of(q, k, q_offsets, kv_offsets, schedule, max_q, shared_q)
    return launch.backward(grad, q, k, v, q_offsets, kv_offsets, schedule, *options, gluon=implementation == "gluon")


def _fake_backward(grad, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _gradient(ctx, grad):
    return *backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 8


_schedule = define("gdpa_schedule", _run_schedule, _fake_schedule)
forward = define("gdpa_fwd", _run_forward, _fake_forward, _save, _gradient)
backward = define("gdpa_bwd", _run_backward, _fake_backward)


# ---- FLOP formulas (torch.utils.flop_counter; the counter is a profiling tool, so reading lengths back is allowed) ---


@register_flop_formula(torch.ops.opengem.gdpa_fwd, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, schedule, max_q, max_kv, activation, scale, shared_q, **kwargs):
    kv_lengths = kv_offsets.diff().tolist()
    q_lengths = [q.shape[0]] * len(kv_lengths) if shared_q else q_offsets.diff().tolist()
    return cost.flops(q_lengths, kv_lengths, q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.opengem.gdpa_bwd, get_raw=True)
def _backward_flops(grad, *args, **kwargs) -> int:
    return int(cost.BACKWARD_MFU * _forward_flops(*args))
