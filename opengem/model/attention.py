"""Attention of the sequence side: a history to itself, a history to the features, learned seeds to a history.

Every module takes the layer norm of the events as a Jagged `[T, d]` (one norm serves all parts of a layer) and keeps it
ragged; those that change events give the update, which `blocks.StreamState` adds. Scales are constants of the config,
never taken from a batch. Read `blocks.py` next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from opengem.config import ModelConfig, StreamConfig
from opengem.jagged import Jagged
from opengem.kernels.block import cost as block_cost
from opengem.kernels.block.op import block_attention, pack_angles
from opengem.kernels.gdpa import cost as gdpa_cost
from opengem.kernels.gdpa.op import gdpa
from opengem.kernels.jfa import cost as jfa_cost
from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.kernels.pool.op import average_and_count, modulated_norm
from opengem.kernels.rope.op import apply_rope, rope_tables
from opengem.model.interaction import TokenMix, mix_tokens


@dataclass(frozen=True)
class Rotation:
    """Rotary angles as float32 cos and sin `[rows, head_dim / 2]`: a row for each position in a sample
    (`by_position`), or a row for each event of the batch. packed: as block attention reads them on a GPU, or None."""

    cos: Tensor
    sin: Tensor
    by_position: bool
    packed: Tensor | None

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, by_position: bool) -> Rotation:
        return cls(cos, sin, by_position, pack_angles(cos, sin) if cos.is_cuda else None)  # once for all layers


def rotation(history: Jagged, log_gap: Tensor, head_dim: int, *, positions: bool, time: bool) -> Rotation | None:
    """The angles of every event, or None where neither positions nor time are wanted.

    angle_i = position * theta_i + log_gap * phi_i: position counts from 0 at the sample's oldest event, `log_gap`
    float32 `[T]` is log(1 + seconds before the request / time scale) (ROTE of Kunlun, arXiv 2602.10016).
    """
    if not time:
        tables = rope_tables(history.max_length, head_dim, device=log_gap.device) if positions else None
        return Rotation.of(*tables, by_position=True) if positions else None
    share = torch.arange(0, head_dim, 2, device=log_gap.device, dtype=torch.float32) / head_dim
    angle = log_gap[:, None] * math.pi * 16.0**-share
    if positions:
        angle = angle + history.positions[:, None].float() * 10_000.0**-share
    return Rotation.of(angle.cos(), angle.sin(), by_position=False)


def rotate(x: Tensor, history: Jagged, angles: Rotation) -> Tensor:
    """Rotate the rows of x `[T, H, D]`. Angles of every event are positions in one sample as long as the batch."""
    if angles.by_position:
        return apply_rope(x, history.offsets, angles.cos, angles.sin, max_length=history.max_length)
    whole = torch.stack([history.offsets[0], history.offsets[-1]])
    return apply_rope(x, whole, angles.cos, angles.sin, max_length=x.shape[0])


class SplitHeads(torch.autograd.Function):
    """`x.chunk(parts, 1)` of `[T, H, D]`; the backward copies nothing where the gradients already lie side by side."""

    @staticmethod
    def forward(ctx, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        return x.chunk(parts, 1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.compiler.is_compiling() or not _side_by_side(grads):
            return torch.cat(grads, 1), None
        rows, heads, dim = grads[0].shape
        return grads[0].as_strided((rows, len(grads) * heads, dim), grads[0].stride()), None


def _side_by_side(parts: tuple[Tensor, ...]) -> bool:
    """Whether the parts follow each other along the heads of one buffer."""
    first, width = parts[0], parts[0].shape[1] * parts[0].shape[2]
    return all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.stride() == first.stride()
        and part.shape == first.shape and part.storage_offset() == first.storage_offset() + i * width
        for i, part in enumerate(parts)
    )


class _LinearOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight), x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor | None, rest: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return rest, None
        x, weight = ctx.saved_tensors
        own = (grad.T @ x.to(grad.dtype)).to(weight.dtype)
        weight = weight.to(grad.dtype)
        if rest is None or rest.dtype != grad.dtype or torch.compiler.is_compiling():
            product = (grad @ weight).to(x.dtype)
            return product if rest is None else rest + product, own
        return rest.addmm_(grad, weight), own


def _linear_on(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """(`layer(x)`, x for whoever reads it next), without a bias: x `[T, d]`.

    In the backward the product is added to the gradient that comes back from the next reader, in place, by the kernel
    that makes it: where several read x, no pass over `[T, d]` only adds. Nothing else may still need that gradient; it
    does not if the next reader's comes to be after the result of this layer was used, as in a residual sum.
    """
    return _LinearOn.apply(x, layer.weight)


class SelfAttention(nn.Module):
    """Attention inside each history: in blocks of `window`, in a sliding window, or in full."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__()
        self.kind, self.block, self.heads, self.dim = config.attention, config.window, config.heads, config.dim
        self.window = (config.window, config.window) if self.kind == "window" else None
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Jagged, angles: Rotation | None) -> Jagged:
        heads = self.qkv(x.values).unflatten(1, (3 * self.heads, -1))
        if self.kind == "block":
            rope = {}
            if angles is not None:
                table = (angles.cos, angles.sin) if angles.packed is None else angles.packed
                rope = {"rope": table, "rope_by_row": not angles.by_position}
            q, k, v = SplitHeads.apply(heads, 3)
            out = block_attention(q, k, v, x.offsets, max_length=x.max_length, block=self.block, **rope)
        else:
            both, v = heads.split([2 * self.heads, self.heads], 1)
            q, k = (both if angles is None else rotate(both, x, angles)).chunk(2, 1)
            out = jagged_flash_attention(q, k, v, x.offsets, max_q=x.max_length, window=self.window)
        return x.with_values(self.out(out.flatten(1)))

    def flops(self, lengths: list[int]) -> int:
        width = self.heads, self.dim // self.heads
        projections = 8 * sum(lengths) * self.dim * self.dim
        if self.kind == "block":
            return projections + block_cost.flops(lengths, *width, block=self.block)
        return projections + jfa_cost.flops(lengths, lengths, *width, window=self.window)


class ContextAttention(nn.Module):
    """The GDPA cross block: every event attends to `num_kv` context tokens made from the feature summary.

    With normalised events h: `rms_norm(h + out(act(q(h) Kᵀ / sqrt(head_dim)) V))`, no learned scale, as in the block
    described for GEM (PyTorch blog, "Towards Free Normalization"). With the identity as activation this is a
    linear map of h whose matrix K Vᵀ is generated from the features (the PFFN of InterFormer).
    """

    def __init__(self, config: StreamConfig, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.num_kv, self.activation = config.heads, config.dim, model.num_kv, model.activation
        self.key_tokens, self.value_tokens = (TokenMix(model.num_summary, model.num_kv) for _ in range(2))
        self.key, self.value = (nn.Linear(model.dim, config.dim, bias=False) for _ in range(2))
        self.query, self.out = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(2))
        nn.init.normal_(self.value.weight, std=(model.dim * model.num_kv) ** -0.5)

    def forward(self, x: Jagged, summary: Tensor) -> tuple[Tensor, Tensor]:
        """(projected output, h): the update is the RMS norm of their sum, which `StreamState.plus_normed` takes along.

        summary: `[B, num_summary, model dim]`.
        """
        q, values = _linear_on(self.query, x.values)
        q = q.unflatten(1, (self.heads, -1))
        k, v = self.context(summary)
        offsets = torch.arange(0, x.batch_size * self.num_kv + 1, self.num_kv, device=x.device)
        out = gdpa(q, k, v, x.offsets, offsets, max_q=x.max_length, max_kv=self.num_kv, activation=self.activation,
                   scale=(self.dim // self.heads) ** -0.5)
        return self.out(out.flatten(1)), values

    def context(self, summary: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, `[B * num_kv, H, D]`."""
        k, v = self.key(self.key_tokens(summary)), self.value(self.value_tokens(summary))
        return tuple(part.reshape(-1, self.heads, self.dim // self.heads) for part in (k, v))

    def flops(self, lengths: list[int]) -> int:
        rows, events = len(lengths), sum(lengths)
        width = self.key.in_features
        context = 2 * self.key_tokens.flops(rows, width) + 4 * rows * self.num_kv * width * self.dim
        scores = gdpa_cost.flops(lengths, [self.num_kv] * rows, self.heads, self.dim // self.heads)
        return context + 4 * events * self.dim * self.dim + scores


class SumKron(nn.Module):
    """`sum_i Z_iᵀ X W_i`: `[B, tokens_in, dim_in]` to `[B, tokens_out, dim_out]` with rank terms.

    A dense map of the flattened input with a matrix that is a sum of Kronecker products Z_i (x) W_i.
    """

    def __init__(self, tokens_in: int, tokens_out: int, dim_in: int, dim_out: int, rank: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(rank, tokens_in, tokens_out) * tokens_in**-0.5)
        self.channels = nn.Parameter(torch.randn(rank, dim_in, dim_out) * (rank * dim_in) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        rank, tokens_in, tokens_out = self.tokens.shape
        both = self.tokens.permute(2, 0, 1).reshape(tokens_out * rank, tokens_in)
        mixed = mix_tokens(both, x).unflatten(1, (tokens_out, rank)).flatten(2)  # [B, tokens_out, rank * dim_in]
        return F.linear(mixed, self.channels.flatten(0, 1).T)

    def flops(self, rows: int) -> int:
        rank, tokens_in, tokens_out = self.tokens.shape
        dim_in, dim_out = self.channels.shape[1:]
        return 2 * rows * rank * tokens_out * dim_in * (tokens_in + dim_out)


class SeedPooling(nn.Module):
    """Hierarchical seed pooling: a whole history `[T, d]` to `[B, pooled_tokens, model dim]`.

    Learned seeds, shifted and scaled by the candidate (so that pooling looks for what the candidate resembles), attend
    to all events. Softmax can only average, so the last `counting_heads` sum `relu(q kᵀ) v` instead, compressed by a
    signed log: pooling that can count. SumKron turns seeds into tokens. An empty history gives zeros.
    """

    def __init__(self, config: StreamConfig, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.seeds = config.heads, config.dim, model.seeds
        self.counting = model.counting_heads
        self.seed = nn.Parameter(torch.randn(model.seeds, config.dim))
        self.condition = nn.Linear(model.dim, 2 * config.dim)
        self.query, self.out = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(2))
        self.key_value = nn.Linear(config.dim, 2 * config.dim, bias=False)
        self.kron = SumKron(model.seeds, model.pooled_tokens, config.dim, model.dim, model.sumkron_rank)

    def forward(self, x: Jagged, candidate: Tensor) -> tuple[Tensor, Jagged]:
        """(pooled tokens, x for whoever reads it next: see `_linear_on`). candidate: `[B, model dim]`."""
        scale, shift = self.condition(candidate).chunk(2, 1)
        q = self.query(modulated_norm(self.seed.to(scale.dtype), scale, shift))  # [B, seeds, d]
        q = q.reshape(-1, self.heads, self.dim // self.heads)
        kv, values = _linear_on(self.key_value, x.values)
        kv = kv.unflatten(1, (2 * self.heads, -1))
        offsets = torch.arange(0, candidate.shape[0] * self.seeds + 1, self.seeds, device=candidate.device)
        rows = {"q_offsets": offsets, "kv_offsets": x.offsets, "max_q": self.seeds, "max_kv": x.max_length}
        pooled = self.attend(q, kv, rows)
        return self.kron(self.out(pooled.flatten(1).unflatten(0, (-1, self.seeds)))), x.with_values(values)

    def attend(self, q: Tensor, kv: Tensor, rows: dict) -> Tensor:
        if 0 < self.counting < self.heads:
            return average_and_count(q, kv, counting=self.counting, **rows)
        if not self.counting:
            return jagged_flash_attention(q, *SplitHeads.apply(kv, 2), **rows)
        scale = (self.dim // self.heads) ** -0.5
        sums = gdpa(q, *SplitHeads.apply(kv, 2), activation="relu", scale=scale, **rows)
        return (sums.detach().sign() * torch.log1p(sums.abs())).to(q.dtype)

    def flops(self, lengths: list[int]) -> int:
        rows, events, square = len(lengths), sum(lengths), self.dim * self.dim
        condition = 2 * rows * self.condition.weight.numel()
        scores = jfa_cost.flops([self.seeds] * rows, lengths, self.heads, self.dim // self.heads)
        return condition + 4 * events * square + 4 * rows * self.seeds * square + scores + self.kron.flops(rows)
