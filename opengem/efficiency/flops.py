"""Useful FLOPs, from real lengths, masks and windows.

Useful: padding, recomputation, element-wise work and embedding look-ups count 0; attention counts what its mask lets
through; a training step is three forwards. Every module counts itself (`GEM.flops`, `kernels/*/cost.py`); here are the
sums over a run, and the part that is attention, for the convention that counts its backward 2.5 times instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import nn

from opengem.kernels.gdpa import cost as gdpa_cost
from opengem.kernels.jfa import cost as jfa_cost

TRAINING = 3  # forwards in a training step: the backward is two


class RunFlops:
    """Useful FLOPs of training on a histogram of histories, however long the run was.

    forward: `GEM.flops`, which is a sum over samples and streams, so that it is called once a distinct length.
    """

    def __init__(self, forward: Callable[[dict[str, list[int]]], dict[str, int]], streams: list[str]) -> None:
        empty = {stream: [0] for stream in streams}
        self.base = sum(forward(empty).values())
        self.extra = cache(lambda stream, length: sum(forward({**empty, stream: [length]}).values()) - self.base)

    def training(self, histories: dict[str, list[int]], samples: int) -> int:
        """histories: stream -> number of samples by history length, index 0 first."""
        total = self.base * samples
        for stream, counts in histories.items():
            total += sum(count * self.extra(stream, length) for length, count in enumerate(counts) if count and length)
        return TRAINING * total


def attention(model: nn.Module, lengths: dict[str, list[int]]) -> int:
    """The part of a `GEM`'s forward FLOPs that is scores and their product with the values."""
    rows = max((len(values) for values in lengths.values()), default=1)
    total = sum(_pooling(m.pooling, lengths[s]) for s, m in model.last_summaries.items())
    for layer in model.layers:
        if layer.cross_layer is not None:
            total += 4 * rows * layer.tokens * layer.earlier * layer.cross_layer.query.in_features
        for s, stream in layer.streams.items():
            own = lengths[s]
            if stream.summary is not None:
                total += _pooling(stream.summary.pooling, own)
            if stream.context is not None:
                m = stream.context
                total += gdpa_cost.flops(own, [m.num_kv] * rows, m.heads, m.dim // m.heads)
            if stream.attention is not None:
                total += stream.attention.flops(own) - 8 * sum(own) * stream.attention.dim**2
    return total


def _pooling(m: nn.Module, lengths: list[int]) -> int:
    return jfa_cost.flops([m.seeds] * len(lengths), lengths, m.heads, m.dim // m.heads)
