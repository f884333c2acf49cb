"""GEM: feature interaction and event sequences, interleaved.

    events ----> S(0) --[context attention, self-attention]--> S(1) --> ... --> S(L)
                  | pooled tokens      ^ feature summary                         | pooled tokens
                  v                    |                                         v
    features --> X(0) --[summary | pooled -> Wukong experts]--> X(1) --> ... --> X(L) --> heads

In each layer both sides read the state of the layer before: X_sum is a summary of X; the experts eat X_sum and the
pooled tokens of every stream; the events attend to X_sum. Histories stay ragged and whole to the end.
Sources: InterFormer (arXiv 2411.09852), Kunlun (arXiv 2602.10016), Wukong (arXiv 2403.02545).
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn as nn
from torch import Tensor

from opengem.config import ModelConfig, StreamConfig
from opengem.data.batch import Batch, Embedded
from opengem.data.schema import Feature, Schema
from opengem.errors import UserError
from opengem.kernels.norm.op import layer_norm, layer_norm_on
from opengem.model.attention import rotation
from opengem.model.blocks import HistorySummary, StreamLayer, StreamState
from opengem.model.heads import Head
from opengem.model.interaction import CrossLayerAttention, Experts, WeightGeneration
from opengem.model.tokenizer import EventTokenizer, FeatureTokenizer
from opengem.model.towers import Towers, sides


def stream_config(config: ModelConfig, name: str) -> StreamConfig:
    """The entry of `config.streams` named `name`, else the one named "*". Raises UserError where there is neither."""
    for wanted in (name, "*"):
        for entry in config.streams:
            if entry.name == wanted:
                return entry
    raise UserError(
        f"config model.streams: no entry for stream {name!r} of this data set and none named '*'; add one of them"
    )


class Layer(nn.Module):
    """One layer: the feature side and every stream side, both computed from the layer before."""

    def __init__(self, index: int, tokens: int, earlier: int, streams: dict[str, StreamConfig],
                 config: ModelConfig) -> None:
        super().__init__()
        letter = config.schedule[index % len(config.schedule)]
        active = {name: s for name, s in streams.items() if s.layers == 0 or index < s.layers}
        self.tokens, self.earlier = tokens, earlier
        self.weights = WeightGeneration(tokens, config.num_summary, config.dim)
        self.streams = nn.ModuleDict({name: StreamLayer(letter, s, config) for name, s in active.items()})
        self.experts = Experts(
            config.num_summary + len(streams) * summary_tokens(config), config.experts, config.dim, config.fm_tokens,
            config.linear_tokens, config.fm_rank, config.expert_hidden,
        )
        attends = config.cross_layer_attention and earlier > 0
        self.cross_layer = CrossLayerAttention(config.dim, config.heads) if attends else None

    def forward(self, x: list[Tensor], states: dict[str, StreamState], candidate: Tensor) -> Tensor:
        """x: outputs of all layers before, normalised, the last one the input. Updates `states`; returns the output."""
        tokens = x[-1]
        if self.cross_layer is not None:
            tokens = layer_norm(self.cross_layer(tokens, torch.cat(x[:-1], 1)))
        summary = self.weights(tokens)
        for name, layer in self.streams.items():
            states[name] = layer.pool(states[name], candidate)
        pooled = [state.summary.to(summary.dtype) for state in states.values()]
        out = self.experts([summary, *pooled])
        for name, layer in self.streams.items():
            states[name] = layer(states[name], summary)
        return out

    def flops(self, lengths: dict[str, list[int]], rows: int) -> Counter:
        total = Counter(weight_generation=self.weights.flops(rows), experts=self.experts.flops(rows))
        if self.cross_layer is not None:
            total["cross_layer"] = self.cross_layer.flops(rows, self.tokens, self.earlier)
        for name, layer in self.streams.items():
            total.update(layer.flops(lengths[name]))
        return total


def summary_tokens(config: ModelConfig) -> int:
    """Tokens each stream hands to the feature side."""
    return config.pooled_tokens + config.recent_tokens


class Logits(dict[str, Tensor]):
    """Label -> float32 logits `[B]`. towers: in training, the vectors of user and candidate, `[B, tower_dim]` each."""

    towers: tuple[Tensor, Tensor] | None = None


class GEM(nn.Module):
    """The dense tower.

    schema: the data set; features: the sample features that are inputs; embedding_dim: width of the embedded ids.
    `forward(batch, embedded)` gives float32 logits `[B]` for each label, the conditional one for a label with `given`.
    With `config.tower_dim`, where user and candidate have ids, these go with the logits in training (`Logits.towers`).
    A sample's logits depend on that sample alone. Histories may be empty and so may the batch.
    Works in float32, or under `torch.autocast` to bfloat16 on a GPU.
    """

    def __init__(self, schema: Schema, features: list[Feature], config: ModelConfig, embedding_dim: int) -> None:
        super().__init__()
        self.config = config
        streams = self.stream_configs = {s.name: stream_config(config, s.name) for s in schema.streams}
        self.events = nn.ModuleDict({
            s.name: EventTokenizer(s, features, config, embedding_dim, streams[s.name].dim, streams[s.name].taps)
            for s in schema.streams
        })
        counts = sum(tokenizer.num_counts for tokenizer in self.events.values())
        self.features = FeatureTokenizer(features, counts, config, embedding_dim)
        each = config.experts * (config.fm_tokens + config.linear_tokens)
        tokens = [config.num_feature_tokens] + [each] * config.layers
        self.layers = nn.ModuleList(
            Layer(i, tokens[i], sum(tokens[:i]), streams, config) for i in range(config.layers)
        )
        self.last_summaries = nn.ModuleDict({name: HistorySummary(s, config) for name, s in streams.items()})
        width = (tokens[-1] + len(streams) * summary_tokens(config)) * config.dim
        self.heads = nn.ModuleDict({label.name: Head(width, config.head_hidden) for label in schema.labels})
        second = config.feature_hidden
        self.feature_heads = nn.ModuleDict(
            {label.name: Head(self.features.count * embedding_dim, second) for label in schema.labels if second}
        )
        wanted = config.tower_dim > 0 and all(sides(features))
        self.towers = Towers(features, config.tower_dim, embedding_dim) if wanted else None

    def forward(self, batch: Batch, embedded: Embedded) -> Logits:
        states, counts = self.tokenize_events(batch, embedded)
        vectors = self.features.vectors(batch, embedded, counts)
        tokens, candidate = self.features(vectors)
        x = [layer_norm(tokens)]
        for layer in self.layers:
            x.append(layer(x, states, candidate))
        for name, summary in self.last_summaries.items():
            states[name] = summary(states[name], candidate)
        last = torch.cat([x[-1], *[state.summary.to(x[-1].dtype) for state in states.values()]], 1)
        return self.logits(layer_norm(last).flatten(1), vectors, embedded)

    def logits(self, last: Tensor, vectors: Tensor, embedded: Embedded) -> Logits:
        """last: the flat tokens that the heads read, `[B, width]`; vectors: of the features."""
        logits = Logits({name: head(last) for name, head in self.heads.items()})
        for name, head in self.feature_heads.items():
            logits[name] = logits[name] + head(vectors.flatten(1))
        if self.towers is not None and self.training:
            logits.towers = self.towers(embedded)
        return logits

    def tokenize_events(self, batch: Batch, embedded: Embedded) -> tuple[dict[str, StreamState], list[Tensor]]:
        states, counts = {}, []
        for name, tokenizer in self.events.items():
            config, view = self.stream_configs[name], tokenizer.view(batch)
            counts.append(tokenizer.counts(view, batch))
            log_gap = torch.log1p(view.gap / self.config.time_scale_s)
            angles = rotation(view.history, log_gap, config.dim // config.heads, positions=self.config.rope,
                              time=self.config.time_encoding)
            events = tokenizer(batch, embedded, view)
            normed, values = layer_norm_on(events.values)
            states[name] = StreamState(events.with_values(values), events.with_values(normed), angles)
        return states, counts

    def num_parameters(self) -> int:
        """Dense parameters; embedding tables are not part of the model."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, lengths: dict[str, list[int]]) -> dict[str, int]:
        """Useful forward FLOPs by part for samples whose stream histories have these lengths.

        `lengths[stream][b]` is the length of sample b; every stream has the same number of samples (one sample where
        the data set has no stream). 2 FLOPs a multiply-add, attention by what its mask lets through; padding,
        element-wise work, norms and embedding lookups count 0. A training step is three times the sum.
        """
        rows = max((len(values) for values in lengths.values()), default=1)
        total = Counter(features=self.features.flops(rows))
        for name, tokenizer in self.events.items():
            total["events"] += tokenizer.flops(sum(lengths[name]))
            total["pooling"] += self.last_summaries[name].flops(lengths[name])
        for layer in self.layers:
            total.update(layer.flops(lengths, rows))
        total["heads"] = sum(head.flops(rows) for head in (*self.heads.values(), *self.feature_heads.values()))
        if self.towers is not None:
            total["towers"] = self.towers.flops(rows)
        return dict(total)
