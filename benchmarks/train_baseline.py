"""The honest baseline of the training ladder: GEM's function in plain PyTorch on padded batches.

Events are `[B, L, d]`, L the longest history the recipe keeps, padded behind the tokenizers, which all rungs share;
attention is `scaled_dot_product_attention` with key masks, GDPA two batched products; every layer of a stream and every
attention to earlier layers is compiled. It computes with the parameters of the GEM it is given and gives its logits, so
that only speed differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from opengem.data.batch import Batch, Embedded
from opengem.efficiency import layers
from opengem.kernels.gdpa.activations import ACTIVATIONS
from opengem.model.attention import ContextAttention, Rotation, SeedPooling, SelfAttention
from opengem.model.blocks import HistorySummary, StreamLayer, StreamState
from opengem.model.gem import GEM, Layer, Logits
from opengem.model.interaction import CrossLayerAttention

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Padded:
    """A stream inside the baseline: events `[B, L, d]`, which of them exist `[B, L]`, rotary cos and sin."""

    def __init__(self, state: StreamState, longest: int) -> None:
        self.events = state.events.to_padded(size=longest)
        self.exists = torch.arange(longest, device=state.events.device) < state.events.lengths[:, None]
        self.angles = None if state.angles is None else _padded_angles(state.angles, state, longest)
        self.pooled: Tensor | None = None


class Part(nn.Module):
    """One layer of the baseline: `function` of a module of the GEM, whose parameters stay the GEM's."""

    def __init__(self, function: Callable, module: nn.Module) -> None:
        super().__init__()
        self.function, self.of = function, [module]  # in a list: not a child, so no parameter has two names

    def forward(self, *inputs) -> Tensor:
        return self.function(self.of[0], *inputs)


class Baseline(nn.Module):
    """`forward` like `gem`'s, for block or no self-attention. compiled: torch.compile each kind of attention layer.

    The batch dimension is dynamic from the start, so that another batch size compiles nothing again.
    """

    def __init__(self, gem: GEM, compiled: bool = True) -> None:
        super().__init__()
        self.gem, self.calls = gem, {}
        self.stream, self.summary, self.cross = (
            partial(self.call, torch.compile(function) if compiled else function)
            for function in (_stream_layer, _summary, _cross_layer)
        )

    def call(self, function: Callable, module: nn.Module, *inputs) -> Tensor:
        if module not in self.calls:
            self.calls[module] = Part(function, module)
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, Tensor) and tensor.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.calls[module](*inputs)

    def flops(self, lengths: dict[str, list[int]]) -> dict[str, int]:
        return self.gem.flops(lengths)

    def layers(self, lengths: dict[str, list[int]]) -> list[layers.Part]:
        """The layers of the GEM, to be timed where the baseline runs them (after a first step)."""
        found = []
        for part in layers.parts(self.gem, lengths):
            around = next((m for m in self.calls if getattr(m, "context", 0) is part.module
                           or getattr(m, "attention", 0) is part.module), part.module)
            found.append(replace(part, module=self.calls.get(around, part.module)))
        return found

    def forward(self, batch: Batch, embedded: Embedded) -> Logits:
        gem = self.gem
        found, counts = gem.tokenize_events(batch, embedded)
        states = {name: Padded(state, gem.stream_configs[name].max_length) for name, state in found.items()}
        vectors = gem.features.vectors(batch, embedded, counts)
        tokens, candidate = gem.features(vectors)
        x = [_norm(tokens)]
        with sdpa_kernel(BACKENDS, set_priority=True):
            for layer in gem.layers:
                x.append(self.layer(layer, x, states, candidate))
            last = [self.summary(m, states[s].events, states[s].exists, candidate) for s, m in
                    gem.last_summaries.items()]
        flat = _norm(torch.cat([x[-1], *[part.to(x[-1].dtype) for part in last]], 1)).flatten(1)
        return gem.logits(flat, vectors, embedded)

    def layer(self, layer: Layer, x: list[Tensor], states: dict[str, Padded], candidate: Tensor) -> Tensor:
        tokens = x[-1]
        if layer.cross_layer is not None:
            tokens = self.cross(layer.cross_layer, tokens, torch.cat(x[:-1], 1))
        summary = layer.weights(tokens)
        for name, stream in layer.streams.items():
            if stream.summary is not None:
                states[name].pooled = self.summary(stream.summary, states[name].events, states[name].exists, candidate)
        out = layer.experts([summary, *[s.pooled.to(summary.dtype) for s in states.values()]])
        for name, stream in layer.streams.items():
            state = states[name]
            state.events = self.stream(stream, state.events, state.exists, state.angles, summary)
        return out


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[..., n, d]` to `[..., heads, n, d / heads]`."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def _stream_layer(layer: StreamLayer, x: Tensor, exists: Tensor, angles: tuple | None, summary: Tensor) -> Tensor:
    if layer.context is not None:
        x = x + _context(layer.context, _norm(x), summary)
    if layer.attention is not None:
        x = x + _block_attention(layer.attention, _norm(x), exists, angles)
    return x


def _context(m: ContextAttention, x: Tensor, summary: Tensor) -> Tensor:
    k, v = (part.unflatten(0, (x.shape[0], -1)).transpose(1, 2) for part in m.context(summary))
    scores = _heads(m.query(x), m.heads) @ k.transpose(2, 3) * (m.dim // m.heads) ** -0.5
    h = m.out(_merge(ACTIVATIONS[m.activation].value(scores) @ v)) + x
    return F.rms_norm(h, h.shape[-1:], eps=1e-5)


def _block_attention(m: SelfAttention, x: Tensor, exists: Tensor, angles: tuple | None) -> Tensor:
    """Block boundaries count from the start of a sample, so blocks are a reshape."""
    extra = -x.shape[1] % m.block
    x, exists = F.pad(x, (0, 0, 0, extra)), F.pad(exists, (0, extra))
    q, k, v = _heads(m.qkv(x), 3 * m.heads).chunk(3, 1)
    if angles is not None:
        cos, sin = (F.pad(a, (0, 0, 0, extra))[:, None] for a in angles)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    q, k, v = (part.unflatten(2, (-1, m.block)).transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    keys = exists.unflatten(1, (-1, m.block)).flatten(0, 1)
    keys = keys | ~keys.any(1, keepdim=True)  # a block without events attends to anything: nothing reads it
    out = F.scaled_dot_product_attention(q, k, v, keys[:, None, None].expand(-1, -1, m.block, -1))
    out = out.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return m.out(_merge(out)[:, : x.shape[1] - extra])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _padded_angles(angles: Rotation, state: StreamState, longest: int) -> tuple[Tensor, Tensor]:
    if angles.by_position:
        return tuple(F.pad(a, (0, 0, 0, longest - a.shape[0]))[None] for a in (angles.cos, angles.sin))
    return tuple(state.events.with_values(a).to_padded(size=longest) for a in (angles.cos, angles.sin))


def _summary(m: HistorySummary, events: Tensor, exists: Tensor, candidate: Tensor) -> Tensor:
    pooled = _pool(m.pooling, _norm(events), exists, candidate)
    back = exists.sum(1)[:, None] - torch.arange(1, m.recent + 1, device=events.device)
    newest = events.gather(1, back.clamp(min=0)[..., None].expand(-1, -1, events.shape[2])) * (back >= 0)[..., None]
    return m.gate(torch.cat([pooled, m.lift(newest)], 1)) * m.opening.to(pooled.dtype)


def _pool(m: SeedPooling, x: Tensor, exists: Tensor, candidate: Tensor) -> Tensor:
    scale, shift = m.condition(candidate)[:, None].chunk(2, dim=2)
    kinds = m.heads - m.counting, m.counting
    q = _heads(m.query(_norm(torch.addcmul(shift, m.seed.to(scale.dtype), 1 + scale))), m.heads).split(kinds, 1)
    kv = _heads(m.key_value(x), 2 * m.heads).split(2 * kinds, 1)
    keys, some = exists[:, None, None], exists.any(1)[:, None, None, None]
    average = F.scaled_dot_product_attention(q[0], kv[0], kv[2], (keys | ~some).expand(-1, -1, m.seeds, -1)) * some
    sums = F.relu(q[1] @ kv[1].transpose(2, 3) * (m.dim // m.heads) ** -0.5) * keys @ kv[3]
    sums = (sums.detach().sign() * torch.log1p(sums.abs())).to(q[1].dtype)
    return m.kron(m.out(_merge(torch.cat([average, sums], 1))))


def _cross_layer(m: CrossLayerAttention, x: Tensor, earlier: Tensor) -> Tensor:
    k, v = _heads(m.key_value(earlier), 2 * m.heads).chunk(2, 1)
    out = m.out(_merge(F.scaled_dot_product_attention(_heads(m.query(x), m.heads), k, v)))
    return _norm(torch.addcmul(x, m.gate.to(x.dtype), out.to(x.dtype)))
