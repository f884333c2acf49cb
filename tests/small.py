"""A small learnable data set and a small recipe, for tests of everything above the data layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, SparseConfig, StreamConfig, TrainConfig
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.data.store import Writer

ITEMS, USERS = 40, 30
SCHEMA = Schema(
    name="small",
    streams=(Stream("view", (Feature("item", rows=ITEMS), Feature("price", "dense"), Feature("action", "bits", 3))),),
    features=(
        Feature("member", rows=USERS, role="user"),
        Feature("candidate", rows=ITEMS, table="item", role="item"),
        Feature("hour", "dense"),
        Feature("popularity", "dense", optional=True),
    ),
    labels=(Label("click"), Label("convert", given="click")),
    splits={"train": (0, 900_000), "test": (900_000, 2_000_000)},
)


def write(folder: Path, rows: int = 600, seed: int = 0) -> Path:
    """`rows` samples, 90 % of them in the train split; clicks depend on the candidate, some histories are empty."""
    r = np.random.default_rng(seed)
    lengths = r.integers(0, 20, USERS)
    lengths[:3] = 0
    total = int(lengths.sum())
    times = np.concatenate([np.sort(r.integers(0, 500_000, n)) for n in lengths]).astype(np.int64)
    flat = {"timestamp": times, "item": r.integers(0, ITEMS, total), "price": r.random(total).astype(np.float32)}
    flat["action"] = r.integers(0, 8, total)
    user = r.integers(0, USERS, rows)
    when = np.sort(r.integers(500_000, 950_000, rows))
    when[int(0.9 * rows) :] = np.sort(r.integers(900_000, 950_000, rows - int(0.9 * rows)))
    when[: int(0.9 * rows)] = np.minimum(when[: int(0.9 * rows)], 899_999)
    candidate = r.integers(0, ITEMS, rows)
    click = (r.random(rows) < 0.05 + 0.9 * (candidate % 2)).astype(np.float32)
    columns = {"user": user, "cut.view": lengths[user], "timestamp": when, "member": user, "candidate": candidate}
    columns |= {"hour": (when // 3600 % 24).astype(np.float32), "popularity": r.random(rows).astype(np.float32)}
    columns |= {"click": click, "convert": click * (r.random(rows) < 0.5).astype(np.float32)}
    with Writer(folder, SCHEMA) as writer:
        writer.write_events({"view": (lengths, flat)}, [f"u{i}" for i in range(USERS)])
        writer.write_samples(columns)
    return folder


def config(tower_dim: int = 0, **train) -> Config:
    """A recipe small enough for a second of training."""
    model = ModelConfig(
        dim=16, layers=2, streams=(StreamConfig(max_length=16, dim=16, heads=2),), num_feature_tokens=4, num_summary=2,
        num_kv=4, seeds=4, pooled_tokens=2, experts=2, fm_tokens=2, linear_tokens=2, fm_rank=2, expert_hidden=16,
        head_hidden=16, tower_dim=tower_dim,
    )  # fmt: skip
    return Config(
        name="small",
        data=DataConfig(batch_size=32, eval_batch_size=64),
        sparse=SparseConfig(dim=8, lr=0.1),
        model=model,
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=replace(TrainConfig(device="cpu", log_every=2, save_every=3, progress=False), **train),
    )
