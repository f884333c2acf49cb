"""Small random data sets for the model's tests: a schema with two streams, and batches of given history lengths."""

from __future__ import annotations

import torch

from opengem.config import ModelConfig, StreamConfig
from opengem.data.batch import Batch, Embedded
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.jagged import Jagged

EMBEDDING_DIM = 8
NOW = 1_700_000_000

SCHEMA = Schema(
    name="random",
    streams=(
        Stream("buy", (
            Feature("product", rows=50, table="product"), Feature("kind", rows=6), Feature("price", "dense"),
            Feature("action", "bits", rows=3),
        )),
        Stream("view", (Feature("seen", rows=50, table="product"),)),
    ),
    features=(
        Feature("item", rows=50, table="product", role="item"), Feature("item_kind", rows=6, table="kind", role="item"),
        Feature("user", rows=20, role="user"), Feature("hour", rows=24), Feature("tags", "ids", rows=9),
        Feature("age", "dense"), Feature("flags", "bits", rows=2),
    ),
    labels=(Label("click"), Label("convert", given="click")),
    splits={"train": (0, NOW), "test": (NOW, 2 * NOW)},
)
FEATURES = list(SCHEMA.features)
SMALL = ModelConfig(
    dim=16, heads=2, layers=2, schedule="FS", num_feature_tokens=6, num_summary=4, num_kv=4, seeds=6, counting_heads=1,
    pooled_tokens=3, recent_tokens=2, sumkron_rank=2, experts=2, fm_tokens=2, linear_tokens=2, fm_rank=3,
    expert_hidden=16, head_hidden=16,
    streams=(
        StreamConfig("buy", max_length=64, dim=16, heads=2, attention="block", window=4),
        StreamConfig("*", max_length=64, dim=8, heads=1, attention="window", window=3, layers=1),
    ),
)  # fmt: skip


def column(feature: Feature, rows: int, generator: torch.Generator) -> torch.Tensor:
    if feature.kind == "dense":
        return torch.randn(rows, generator=generator) * 3
    high = 1 << feature.rows if feature.kind == "bits" else feature.rows
    return torch.randint(high, (rows,), generator=generator)


def make_batch(lengths: dict[str, list[int]], seed: int = 0, samples: int | None = None) -> Batch:
    """Samples whose stream histories have these lengths; max_length is 64 for every stream."""
    samples = len(next(iter(lengths.values()))) if samples is None else samples
    generator = torch.Generator().manual_seed(seed)
    times = torch.full((samples,), NOW) + torch.arange(samples)
    sequences, features = {}, {}
    for stream in SCHEMA.streams:
        sizes = torch.tensor(lengths[stream.name], dtype=torch.int64)
        total = int(sizes.sum())
        ages = torch.randint(10, 10_000_000, (total,), generator=generator)
        history = Jagged.from_lengths(ages, sizes, 64)
        row = history.row_to_sample
        order = (row * 20_000_000 - ages).argsort()
        sequences[f"{stream.name}.timestamp"] = history.with_values(times[row] - ages[order])
        for attribute in stream.attributes:
            values = history.with_values(column(attribute, total, generator))
            sequences[f"{stream.name}.{attribute.name}"] = values
    for feature in FEATURES:
        if feature.kind == "ids":
            sizes = torch.randint(0, 4, (samples,), generator=generator)
            features[feature.name] = Jagged.from_lengths(column(feature, int(sizes.sum()), generator), sizes, 4)
        else:
            features[feature.name] = column(feature, samples, generator)
    labels = {label.name: torch.randint(2, (samples,), generator=generator).float() for label in SCHEMA.labels}
    return Batch(sequences, features, labels, torch.ones(samples), times, torch.arange(samples))


def embed(batch: Batch, dtype: torch.dtype = torch.float32) -> Embedded:
    """Look every id up in fixed random tables (`ids` sum-pooled); the results are leaves that require a gradient."""
    tables = {
        name: torch.randn(rows, EMBEDDING_DIM, generator=torch.Generator().manual_seed(rows), dtype=dtype) * 0.3
        for name, rows in SCHEMA.tables().items()
    }

    def leaf(values: torch.Tensor) -> torch.Tensor:
        return values.detach().clone().requires_grad_()

    sequences = {
        f"{s.name}.{a.name}": batch.sequences[f"{s.name}.{a.name}"].map(lambda ids, a=a: leaf(tables[a.table][ids]))
        for s in SCHEMA.streams for a in s.attributes if a.kind == "id"
    }
    features = {}
    for feature in FEATURES:
        value = batch.features[feature.name]
        if feature.kind == "id":
            features[feature.name] = leaf(tables[feature.table][value])
        if feature.kind == "ids":
            rows = tables[feature.table][value.values]
            pooled = torch.zeros(value.batch_size, EMBEDDING_DIM, dtype=dtype).index_add(0, value.row_to_sample, rows)
            features[feature.name] = leaf(pooled)
    return Embedded(sequences, features)


def take(batch: Batch, index: int) -> Batch:
    """The batch that holds sample `index` alone."""

    def one(value):
        if isinstance(value, Jagged):
            first, last = int(value.offsets[index]), int(value.offsets[index + 1])
            return Jagged(value.values[first:last], torch.tensor([0, last - first]), value.max_length)
        return value[index : index + 1]

    return Batch(
        {name: one(value) for name, value in batch.sequences.items()},
        {name: one(value) for name, value in batch.features.items()},
        {name: one(value) for name, value in batch.labels.items()},
        one(batch.weights), one(batch.timestamps), one(batch.rows),
    )
