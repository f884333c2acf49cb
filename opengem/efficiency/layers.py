"""The layers of the model as the profile sees them, and the named ranges that lead every kernel back to its layer.

A layer is a part of `GEM` whose FLOPs the model can count alone. Forward work is recognised by the range it runs in.
Backward work is recognised by the sequence number of its autograd node: autograd numbers nodes in the order in which
forward made them, so a layer owns the numbers that were given out while it ran. Read `trace.py` next.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps

import torch
import torch.nn as nn
from torch.profiler import record_function

PREFIX = "opengem/"
STEP = f"{PREFIX}step"
OTHER = "other"


@dataclass(frozen=True)
class Part:
    """One layer. name: its path in the model; kind: what it is, as in `GEM.flops`; flops: useful forward FLOPs."""

    name: str
    kind: str
    module: nn.Module
    flops: int


def parts(model: nn.Module, lengths: dict[str, list[int]]) -> list[Part]:
    """Every layer of a `GEM` on samples with these history lengths; their FLOPs sum to those of the model."""
    rows = max((len(values) for values in lengths.values()), default=1)
    found = [Part(f"events.{s}", "events", m, m.flops(sum(lengths[s]))) for s, m in model.events.items()]
    found.append(Part("features", "features", model.features, model.features.flops(rows)))
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}"
        found.append(Part(f"{at}.weights", "weight_generation", layer.weights, layer.weights.flops(rows)))
        found.append(Part(f"{at}.experts", "experts", layer.experts, layer.experts.flops(rows)))
        if layer.cross_layer is not None:
            flops = layer.cross_layer.flops(rows, layer.tokens, layer.earlier)
            found.append(Part(f"{at}.cross_layer", "cross_layer", layer.cross_layer, flops))
        for s, stream in layer.streams.items():
            inside = {"pooling": stream.summary, "gdpa": stream.context, "self_attention": stream.attention}
            found += [Part(f"{at}.{s}.{kind}", kind, m, m.flops(lengths[s])) for kind, m in inside.items() if m]
    last = model.last_summaries.items()
    found += [Part(f"last.{s}.pooling", "pooling", m, m.flops(lengths[s])) for s, m in last]
    if model.towers is not None:
        found.append(Part("towers", "towers", model.towers, model.towers.flops(rows)))
    for at, heads in (("heads", model.heads), ("feature_heads", model.feature_heads)):
        found += [Part(f"{at}.{label}", "heads", m, m.flops(rows)) for label, m in heads.items()]
    return found


@dataclass
class Ranges:
    """Which autograd sequence numbers each range gave out: (first, past the last, range), inner ones before outer.

    active: the ranges that are open now, outer first.
    """

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    active: list[str] = field(default_factory=list)

    def wrap(self, name: str, function: Callable) -> Callable:
        """`function` inside the range `name`."""

        @wraps(function)
        def inside(*args, **kwargs):
            first = torch.autograd._get_sequence_nr()
            self.active.append(name)
            with record_function(PREFIX + name):
                result = function(*args, **kwargs)
            self.active.pop()
            self.spans.append((first, torch.autograd._get_sequence_nr(), name))
            return result

        return inside

    def numbers(self) -> tuple[list[int], list[str]]:
        """Sequence numbers at which the owner changes, and the owner from there on; the innermost range wins."""
        edges = sorted({edge for first, end, _ in self.spans for edge in (first, end)})
        owner = dict.fromkeys(edges, OTHER)
        outer_first = self.spans[::-1]
        for first, end, name in sorted(outer_first, key=lambda span: span[0] - span[1]):  # widest first, ties kept
            for edge in edges:
                if first <= edge < end:
                    owner[edge] = name
        return edges, [owner[edge] for edge in edges]


def owner_of(number: int, edges: list[int], names: list[str]) -> str:
    """The range that gave out a sequence number, by what `Ranges.numbers` returned."""
    at = bisect_right(edges, number) - 1
    return names[at] if at >= 0 else OTHER


@contextlib.contextmanager
def ranged(model: nn.Module, layers: list[Part], phases: dict[str, tuple[object, str]]) -> Iterator[Ranges]:
    """Run the model's layers, and the methods in `phases` (range -> object, method name), inside named ranges.

    A model that is compiled as a whole is one layer: its inside cannot be told apart.
    """
    ranges, undo = Ranges(), contextlib.ExitStack()
    targets = [(part.name, part.module) for part in layers] if model._compiled_call_impl is None else []
    with undo:
        for name, module in [("model", model), *targets]:
            # Module.__call__ prefers this attribute: the range stays outside of what torch.compile traces
            undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = ranges.wrap(name, module._compiled_call_impl or module._call_impl)
        methods = dict(phases)
        if targets:
            for part in layers:
                if part.kind == "events":
                    methods |= {f"{part.name}\0{m}": (part.module, m) for m in ("view", "counts")}
                if part.kind == "features":
                    methods[f"{part.name}\0vectors"] = (part.module, "vectors")
        for name, (owner, method) in methods.items():
            setattr(owner, method, ranges.wrap(name.split("\0")[0], getattr(owner, method)))
            undo.callback(delattr, owner, method)
        yield ranges
