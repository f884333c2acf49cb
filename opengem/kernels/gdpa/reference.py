"""GDPA in plain PyTorch: the definition, and what runs on a CPU.

`out_i = sum_j act(scale * q_i . k_j) v_j` over the keys j of the same sample. No running maximum, no log-sum-exp, and
the backward needs neither `out` nor a row sum: with `s = scale * q k^T`, `p = act(s)`, `ds = (do v^T) * act'(s)`:
`dv = p^T do`, `dq = scale * ds k`, `dk = scale * ds^T q`.

Samples are padded in chunks whose score block stays below `SCORES` elements, computed in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from opengem.kernels.gdpa.activations import ACTIVATIONS
from opengem.kernels.jfa.reference import SCORES, chunks


class _Chunk(NamedTuple):
    """Row numbers of some padded samples, `[b, L]`, and which of them exist."""

    samples: Tensor
    q_rows: Tensor
    q_live: Tensor
    kv_rows: Tensor
    kv_live: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int,
    activation: str, scale: float, shared_q: bool,
) -> Tensor:
    """`out` `[B * S, H, D]` if `shared_q` else `[Tq, H, D]`, dtype of q; rows no sample owns are 0."""
    act = ACTIVATIONS[activation].value
    if shared_q:
        q_offsets = torch.arange(kv_offsets.shape[0], device=q.device) * q.shape[0]
    total = (kv_offsets.shape[0] - 1) * q.shape[0] if shared_q else q.shape[0]
    out = q.new_zeros(total + 1, *q.shape[1:])
    for chunk in _chunks(q_offsets, kv_offsets, max_q, max_kv, q.shape[1]):
        qp, kp, vp = _padded_inputs(q, k, v, chunk, shared_q)
        rows = max(1, SCORES // kp[..., 0].numel())  # queries at once
        parts = [act(scale * (part @ kp.mT)) @ vp for part in qp.split(rows, dim=2)]
        _scatter(out, torch.cat(parts, dim=2), chunk.q_rows, chunk.q_live)
    return out[:-1]


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int,
    activation: str, scale: float, shared_q: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (their shapes and dtypes); rows no sample owns are 0."""
    if shared_q:
        q_offsets = torch.arange(kv_offsets.shape[0], device=q.device) * q.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_zeros(q.shape[0] + 1, *q.shape[1:], dtype=dtype if shared_q else q.dtype)
    dk = k.new_zeros(k.shape[0] + 1, *k.shape[1:])
    dv = torch.zeros_like(dk)
    for chunk in _chunks(q_offsets, kv_offsets, max_q, max_kv, q.shape[1]):
        qp, kp, vp = _padded_inputs(q, k, v, chunk, shared_q)
        gp = _gather(grad, chunk.q_rows, chunk.q_live)
        dqp, dkp, dvp = _chunk_backward(gp, qp, kp, vp, activation, scale)
        _scatter(dk, dkp, chunk.kv_rows, chunk.kv_live)
        _scatter(dv, dvp, chunk.kv_rows, chunk.kv_live)
        if shared_q:
            dq[: q.shape[0]] += dqp.sum(0).transpose(0, 1)
        else:
            _scatter(dq, dqp, chunk.q_rows, chunk.q_live)
    return dq[:-1].to(q.dtype), dk[:-1], dv[:-1]


def _chunk_backward(gp, qp, kp, vp, activation, scale):
    act = ACTIVATIONS[activation]
    dkp, dvp, parts = torch.zeros_like(kp), torch.zeros_like(vp), []
    rows = max(1, SCORES // kp[..., 0].numel())
    for q_part, g_part in zip(qp.split(rows, dim=2), gp.split(rows, dim=2), strict=True):
        s = scale * (q_part @ kp.mT)
        ds = (g_part @ vp.mT) * act.derivative(s) * scale
        dvp += act.value(s).mT @ g_part
        dkp += ds.mT @ q_part
        parts.append(ds @ kp)
    return torch.cat(parts, dim=2), dkp, dvp


def _chunks(q_offsets: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int, heads: int) -> Iterator[_Chunk]:
    """Samples in chunks; none where there is nothing to compute."""
    if max_q == 0 or max_kv == 0 or q_offsets.shape[0] == 1:
        return
    q_lengths, kv_lengths = q_offsets.long().diff(), kv_offsets.long().diff()
    for samples, longest_q, longest_kv in chunks(q_lengths, kv_lengths, max_q, max_kv, heads):
        q_position = torch.arange(longest_q, device=q_offsets.device)
        kv_position = torch.arange(longest_kv, device=q_offsets.device)
        q_rows, kv_rows = (x.long()[samples, None] for x in (q_offsets, kv_offsets))
        q_live, kv_live = q_position < q_lengths[samples, None], kv_position < kv_lengths[samples, None]
        yield _Chunk(samples, q_rows + q_position, q_live, kv_rows + kv_position, kv_live)


def _gather(x: Tensor, rows: Tensor, live: Tensor) -> Tensor:
    """`[b, H, L, D]` in the compute dtype, 0 where no row exists (a foreign NaN cannot leak in)."""
    padded = x[rows.where(live, torch.zeros_like(rows))].to(torch.promote_types(x.dtype, torch.float32))
    return padded.masked_fill(~live[:, :, None, None], 0).transpose(1, 2)


def _padded_inputs(q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, shared_q: bool) -> tuple[Tensor, Tensor, Tensor]:
    if shared_q:
        qp = q.to(torch.promote_types(q.dtype, torch.float32)).transpose(0, 1)
        qp = qp.expand(chunk.samples.shape[0], -1, -1, -1)
    else:
        qp = _gather(q, chunk.q_rows, chunk.q_live)
    kp = _gather(k, chunk.kv_rows, chunk.kv_live)
    return qp, kp, _gather(v, chunk.kv_rows, chunk.kv_live)


def _scatter(out: Tensor, padded: Tensor, rows: Tensor, live: Tensor) -> None:
    """Write `[b, H, L, D]` back to its rows; what is padding goes to the last row, which the caller drops."""
    last = torch.full_like(rows, out.shape[0] - 1)
    out[rows.where(live, last)] = padded.transpose(1, 2).to(out.dtype)
