"""Stand-ins in plain PyTorch for the kernels of the training ladder: same functions, same arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from opengem.kernels.block.reference import unpack
from opengem.kernels.gdpa.activations import ACTIVATIONS
from opengem.kernels.jfa.op import jagged_flash_attention


def _compiled(ragged: int) -> Callable[[Callable], Callable]:
    """torch.compile for inputs whose first `ragged` dimensions change from batch to batch, and no others."""

    def decorate(function: Callable) -> Callable:
        compiled = torch.compile(function, dynamic=True)

        @wraps(function)
        def call(*args):
            for x in args:
                for dim in range(ragged, x.dim() if isinstance(x, Tensor) else 0):
                    torch._dynamo.mark_static(x, dim)
            return compiled(*args)

        return call

    return decorate


@_compiled(ragged=2)
def _products(q: Tensor, k: Tensor, v: Tensor, activation: str, scale: float) -> Tensor:
    """q `[B, m, H, D]`, k and v `[B, n, H, D]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (ACTIVATIONS[activation].value(q @ k.transpose(2, 3) * scale) @ v).transpose(1, 2)


def gdpa(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, max_q: int, max_kv: int,
         activation: str, scale: float) -> Tensor:
    """Two batched products over padded queries and keys; padded values are 0, so padded keys add nothing."""
    (qp, rows), (kp, _), (vp, _) = _pad(q, q_offsets, max_q), _pad(k, kv_offsets, max_kv), _pad(v, kv_offsets, max_kv)
    return _products(qp, kp, vp, activation, scale).flatten(0, 1).index_select(0, rows)


def average_and_count(q: Tensor, kv: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, max_q: int, max_kv: int,
                      counting: int) -> Tensor:
    kinds = q.shape[1] - counting, counting
    (q0, q1), (k0, k1, v0, v1), rows = q.split(kinds, 1), kv.split(2 * kinds, 1), {"max_q": max_q, "max_kv": max_kv}
    sums = gdpa(q1, k1, v1, q_offsets, kv_offsets, activation="relu", scale=q.shape[2] ** -0.5, **rows)
    counts = (sums.detach().sign() * torch.log1p(sums.abs())).to(q.dtype)
    return torch.cat([jagged_flash_attention(q0, k0, v0, q_offsets, kv_offsets, **rows), counts], 1)


def _pad(x: Tensor, offsets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`[B, size, ...]` with zeros behind each sample, and the flat place of every row in it."""
    samples = offsets.shape[0] - 1
    sample = torch.repeat_interleave(torch.arange(samples, device=x.device), offsets.diff(), output_size=x.shape[0])
    rows = torch.arange(x.shape[0], device=x.device) + (torch.arange(samples, device=x.device) * size
                                                        - offsets[:-1])[sample]
    return x.new_zeros(samples * size, *x.shape[1:]).index_copy(0, rows, x).unflatten(0, (samples, size)), rows


def block_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, max_length: int, block: int,
                    rope: tuple[Tensor, Tensor] | Tensor | None = None, rope_by_row: bool = False) -> Tensor:
    """Every block is a sample of flash attention; blocks a short history does not have are empty samples."""
    if rope is not None:
        rope = unpack(rope) if isinstance(rope, Tensor) else rope
        samples = offsets[[0, -1]] if rope_by_row else offsets
        q, k = (apply_rope(x, samples, *rope) for x in (q, k))
    starts = offsets[:-1, None] + torch.arange(0, max_length, block, device=q.device)
    edges = torch.cat([torch.minimum(starts, offsets[1:, None]).flatten(), offsets[-1:]])
    return jagged_flash_attention(q, k, v, edges, max_q=min(block, max_length))


def apply_rope(x: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, *, max_length: int = 0) -> Tensor:
    if offsets.shape[0] != 2:
        sample = torch.repeat_interleave(
            torch.arange(offsets.shape[0] - 1, device=x.device), offsets.diff(), output_size=x.shape[0])
        position = torch.arange(x.shape[0], device=x.device) - offsets[sample]
        cos, sin = cos[position], sin[position]
    return _rotate(x, cos[: x.shape[0]], sin[: x.shape[0]])


@_compiled(ragged=1)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@_compiled(ragged=1)
def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


@_compiled(ragged=1)
def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def layer_norm(x: Tensor, *, residual: Tensor | None = None):
    return _layer_norm(x) if residual is None else (_layer_norm(h := x + residual), h)


def layer_norm_on(x: Tensor) -> tuple[Tensor, Tensor]:
    return _layer_norm(x), x


def modulated_norm(seed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _layer_norm(torch.addcmul(shift[:, None], seed, 1 + scale[:, None]))


def chained_norms(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    total = outer + _rms_norm(x + inner)
    return _layer_norm(total), total
