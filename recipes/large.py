"""For many nodes: 7.4 billion dense parameters, histories of up to 8,192 events."""

from __future__ import annotations

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, SparseConfig, StreamConfig, TrainConfig


def recipe() -> Config:
    """Eight layers of width 1,024; about 876 GFLOP forward with four streams of 4,096 to 512 events."""
    return Config(
        name="large",
        data=DataConfig(batch_size=65_536, eval_batch_size=128),
        sparse=SparseConfig(dim=128, lr=0.02),
        model=ModelConfig(
            dim=1024, heads=8, layers=8, schedule="GS", num_feature_tokens=512, num_summary=256, num_kv=256, seeds=512,
            counting_heads=2, pooled_tokens=64, recent_tokens=4, sumkron_rank=8, experts=8, fm_tokens=16,
            linear_tokens=16, fm_rank=64, expert_hidden=4096, head_hidden=1024,
            streams=(StreamConfig("*", max_length=8192, dim=1024, heads=8, attention="block", window=64),),
        ),
        optim=OptimConfig(lr=2e-4, warmup_steps=2000),
        train=TrainConfig(),
    )  # fmt: skip
