"""A stand-in for real data: batches of the shape a recipe is made for, random but for their lengths.

Random ids are the hard case for look-ups; nothing else in a step depends on values, so a profile without `--data` shows
the speed of the recipe on histories of that length.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opengem.config import Config
from opengem.data import lengths as length_laws
from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.jagged import Jagged

ATTRIBUTES, LABELS = 3, (Label("click"), Label("convert", given="click"))
ATTRIBUTE_ROWS, FEATURE_ROWS = 1_000_000, 10_000
NOW, SPAN_S = 1_700_000_000, 30 * 86_400


def schema(config: Config, streams: int) -> Schema:
    """`streams` streams of three id attributes, as many id features as the model has feature tokens, two labels.

    The first three features share the tables of the event attributes, as a candidate does.
    """
    attributes = tuple(Feature(f"a{i}", rows=ATTRIBUTE_ROWS, table=f"t{i}") for i in range(ATTRIBUTES))
    features = tuple(
        Feature(f"f{i}", rows=ATTRIBUTE_ROWS, table=f"t{i}", role="item") if i < ATTRIBUTES
        else Feature(f"f{i}", rows=FEATURE_ROWS)
        for i in range(config.model.num_feature_tokens)
    )  # fmt: skip
    sources = tuple(Stream(f"s{i}", attributes) for i in range(streams))
    return Schema("stand-in", sources, features, LABELS, {"train": (0, NOW + 1), "test": (NOW + 1, NOW + 2)})


def batch(schema: Schema, max_lengths: dict[str, int], samples: int, lengths: str = "", seed: int = 0) -> Batch:
    """A batch on the CPU. lengths: law of `data/lengths.py` (default: log-normal, half of each stream's longest)."""
    rng = np.random.default_rng(seed)
    sequences: dict[str, Jagged] = {}
    for stream in schema.streams:
        longest = max_lengths[stream.name]
        law = length_laws.parse(lengths or f"lognormal({longest / 2})")
        drawn = torch.from_numpy(law.draw(samples, longest, rng))
        total = int(drawn.sum())
        times = Jagged.from_lengths(NOW - _integers(rng, SPAN_S, total).sort(descending=True).values, drawn)
        sequences[f"{stream.name}.timestamp"] = times
        for attribute in stream.attributes:
            sequences[f"{stream.name}.{attribute.name}"] = times.with_values(_integers(rng, attribute.rows, total))
    labels = {label.name: torch.from_numpy(rng.integers(0, 2, samples).astype(np.float32)) for label in schema.labels}
    return Batch(
        sequences=sequences,
        features={f.name: _integers(rng, f.rows, samples) for f in schema.features},
        labels=labels,
        weights=torch.ones(samples),
        timestamps=torch.full((samples,), NOW),
        rows=torch.arange(samples),
    )


def _integers(rng: np.random.Generator, high: int, count: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, high, count))


def history_lengths(batch: Batch) -> dict[str, list[int]]:
    """stream -> history length of each sample, as `GEM.flops` takes it."""
    ends = ".timestamp"
    return {n.removesuffix(ends): x.lengths.tolist() for n, x in batch.sequences.items() if n.endswith(ends)}
