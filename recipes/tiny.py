"""For a laptop and for tests: 1 million dense parameters, histories of up to 128 events."""

from __future__ import annotations

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, SparseConfig, StreamConfig, TrainConfig


def recipe() -> Config:
    """Two layers of width 64; the newest 128 events of each stream."""
    return Config(
        name="tiny",
        data=DataConfig(batch_size=512, eval_batch_size=1024),
        sparse=SparseConfig(dim=32, lr=0.05),
        model=ModelConfig(
            dim=64, heads=2, layers=2, schedule="GS", num_feature_tokens=16, num_summary=8, num_kv=16, seeds=16,
            counting_heads=1, pooled_tokens=8, recent_tokens=2, sumkron_rank=2, experts=2, fm_tokens=4,
            linear_tokens=4, fm_rank=8, expert_hidden=128, head_hidden=128, feature_hidden=64,
            streams=(StreamConfig("*", max_length=128, dim=32, heads=1, attention="block", window=64),),
        ),
        optim=OptimConfig(lr=1e-3, warmup_steps=30, final_lr_fraction=0.1),
        train=TrainConfig(),
    )  # fmt: skip
