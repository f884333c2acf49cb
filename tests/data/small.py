"""A small data set whose every cell is known, for the tests of the store, the loader and whatever reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opengem.data.columns import Lists, running_sum
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.data.store import Writer

SCHEMA = Schema(
    name="small",
    streams=(
        Stream(
            "view",
            (Feature("item", rows=50, table="item"), Feature("price", "dense"), Feature("action", "bits", rows=3)),
        ),
        Stream("buy", (Feature("item", rows=50, table="item"),)),
    ),
    features=(
        Feature("item", rows=50, table="item", role="item"),
        Feature("tags", "ids", rows=20),
        Feature("hour", "dense"),
        Feature("count", "dense", optional=True),
    ),
    labels=(Label("click"), Label("convert", given="click")),
    splits={"train": (0, 1_000), "test": (1_000, 2_000)},
)


def events(num_users: int = 7, seed: int = 0) -> dict:
    """Argument of `Writer.write_events`: user 0 has no views, user 1 no purchases."""
    rng = np.random.default_rng(seed)
    streams = {}
    for stream, empty in (("view", 0), ("buy", 1)):
        lengths = rng.integers(1, 12, num_users)
        lengths[empty] = 0
        total = int(lengths.sum())
        times = [np.sort(rng.integers(0, 500, n)) for n in lengths]
        streams[stream] = (lengths, {"timestamp": np.concatenate(times), "item": rng.integers(0, 50, total)})
    total = int(streams["view"][0].sum())
    streams["view"][1].update(price=rng.random(total, np.float32), action=rng.integers(0, 8, total))
    return streams


def samples(streams: dict, num_rows: int = 40, seed: int = 1) -> dict:
    """Argument of `Writer.write_samples`: times 500, 550, ... so that every event may be visible."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, len(streams["view"][0]), num_rows)
    tags = rng.integers(0, 4, num_rows)
    click = rng.integers(0, 2, num_rows).astype(np.float32)
    return {
        "user": users,
        **{f"cut.{s}": rng.integers(0, lengths[users] + 1) for s, (lengths, _) in streams.items()},
        "timestamp": 500 + 50 * np.arange(num_rows) * 30 // num_rows,
        "weight": rng.random(num_rows, np.float32),
        "item": rng.integers(0, 50, num_rows),
        "tags": Lists(running_sum(tags), rng.integers(0, 20, tags.sum())),
        "hour": rng.random(num_rows, np.float32),
        "count": rng.random(num_rows, np.float32),
        "click": click,
        "convert": click * rng.integers(0, 2, num_rows),
    }


def write(folder: Path, num_rows: int = 40, num_users: int = 7, schema: Schema = SCHEMA) -> tuple[dict, dict]:
    """Write the set to `folder`; returns (events, samples) as given to the writer."""
    streams = events(num_users)
    columns = samples(streams, num_rows)
    with Writer(folder, schema) as writer:
        writer.write_events(streams, [f"user{i}" for i in range(num_users)])
        writer.write_samples(columns)
    return streams, columns
