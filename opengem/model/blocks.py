"""The sequence side of the model: the state of one event stream and what a layer does to it.

A layer's letter in the schedule says which parts run (computation skipping, Kunlun): G pools afresh and lets the events
attend to the features; S keeps the pooled tokens of the layer before and lets the events attend to each other; F does
all. Read `gem.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from opengem.config import ModelConfig, StreamConfig
from opengem.jagged import Jagged
from opengem.kernels.chain.op import chained_norms
from opengem.kernels.norm.op import layer_norm
from opengem.model.attention import ContextAttention, Rotation, SeedPooling, SelfAttention
from opengem.model.interaction import Gate


@dataclass(frozen=True)
class StreamState:
    """One stream inside the model: events `[T, d]`, their layer norm, their rotary angles, the tokens last pooled."""

    events: Jagged
    normed: Jagged
    angles: Rotation | None
    summary: Tensor | None = None  # [B, pooled_tokens + recent_tokens, model dim]

    def plus(self, update: Jagged) -> StreamState:
        """The sum and its norm are one kernel."""
        normed, events = layer_norm(update.values, residual=self.events.values)
        return replace(self, events=update.with_values(events), normed=update.with_values(normed))

    def plus_normed(self, x: Tensor, inner: Tensor) -> StreamState:
        """`plus(rms_norm(x + inner))`, also one kernel."""
        normed, events = chained_norms(x, inner, self.events.values)
        return replace(self, events=self.events.with_values(events), normed=self.events.with_values(normed))


class HistorySummary(nn.Module):
    """S_sum: what a stream hands to the feature side, gated `[pooled seeds | most recent events]`.

    A second gate starts at 0: histories are fed in as they prove useful, not as noise the experts must first unlearn.
    """

    def __init__(self, config: StreamConfig, model: ModelConfig) -> None:
        super().__init__()
        self.recent = model.recent_tokens
        self.pooling = SeedPooling(config, model)
        self.lift = nn.Linear(config.dim, model.dim, bias=False)
        self.gate = Gate(model.dim)
        self.opening = nn.Parameter(torch.zeros(model.dim))

    def forward(self, state: StreamState, candidate: Tensor) -> StreamState:
        pooled, normed = self.pooling(state.normed, candidate)
        events, recent = newest(state.events, self.recent)
        summary = self.gate(torch.cat([pooled, self.lift(recent)], 1)) * self.opening.to(pooled.dtype)
        return replace(state, events=events, normed=normed, summary=summary)

    def flops(self, lengths: list[int]) -> int:
        rows = len(lengths)
        tokens = self.pooling.kron.tokens.shape[2] + self.recent
        lift = 2 * rows * self.recent * self.lift.weight.numel()
        return self.pooling.flops(lengths) + lift + self.gate.flops(rows * tokens)


def newest(events: Jagged, count: int) -> tuple[Jagged, Tensor]:
    """(events for whoever reads them next, their last `count` `[B, count, d]`, newest first, zeros where there are
    fewer). Handing the events on spares their gradient a pass over zeros and a sum."""
    row = events.offsets[1:, None] - torch.arange(1, count + 1, device=events.device)
    exists = row >= events.offsets[:-1, None]
    if events.values.shape[0] == 0:
        return events, events.values.new_zeros(*row.shape, events.values.shape[1])
    values, chosen = _Choose.apply(events.values, row.clamp(min=0).flatten())
    return events.with_values(values), chosen.unflatten(0, row.shape) * exists[..., None]


class _Choose(torch.autograd.Function):
    """(x, x[row]); the gradient of the rows is added to that of x in place: nothing else may still need that one."""

    @staticmethod
    def forward(ctx, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(row)
        ctx.rows = x.shape[0]
        return x.view_as(x), x.index_select(0, row)

    @staticmethod
    def backward(ctx, grad: Tensor | None, chosen: Tensor | None) -> tuple[Tensor | None, None]:
        if chosen is None:
            return grad, None
        (row,) = ctx.saved_tensors
        whole = chosen.new_zeros(ctx.rows, chosen.shape[1]) if grad is None else grad.contiguous()
        add = whole.index_add if torch.compiler.is_compiling() else whole.index_add_
        return add(0, row, chosen), None


class StreamLayer(nn.Module):
    """One layer of one stream, made of the parts its letter asks for."""

    def __init__(self, letter: str, config: StreamConfig, model: ModelConfig) -> None:
        super().__init__()
        self.summary = HistorySummary(config, model) if letter in "GF" else None
        self.context = ContextAttention(config, model) if letter in "GF" else None
        self.attention = SelfAttention(config) if letter in "SF" and config.attention != "none" else None

    def pool(self, state: StreamState, candidate: Tensor) -> StreamState:
        return state if self.summary is None else self.summary(state, candidate)

    def forward(self, state: StreamState, feature_summary: Tensor) -> StreamState:
        if self.context is not None:
            state = state.plus_normed(*self.context(state.normed, feature_summary))
        if self.attention is not None:
            state = state.plus(self.attention(state.normed, state.angles))
        return state

    def flops(self, lengths: list[int]) -> dict[str, int]:
        parts = {"pooling": self.summary, "gdpa": self.context, "self_attention": self.attention}
        return {name: part.flops(lengths) for name, part in parts.items() if part is not None}
