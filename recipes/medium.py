"""For a node of GPUs: 1.7 billion dense parameters, histories of up to 4,096 events."""

from __future__ import annotations

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, SparseConfig, StreamConfig, TrainConfig


def recipe() -> Config:
    """Eight layers of width 512; about 104 GFLOP forward with three streams of 2,048, 1,024 and 512 events."""
    return Config(
        name="medium",
        data=DataConfig(batch_size=4096, eval_batch_size=512),
        sparse=SparseConfig(dim=128, lr=0.02),
        model=ModelConfig(
            dim=512, heads=4, layers=8, schedule="GS", num_feature_tokens=256, num_summary=128, num_kv=128, seeds=256,
            counting_heads=1, pooled_tokens=32, recent_tokens=4, sumkron_rank=8, experts=4, fm_tokens=16,
            linear_tokens=16, fm_rank=32, expert_hidden=4096, head_hidden=512,
            streams=(StreamConfig("*", max_length=4096, dim=512, heads=4, attention="block", window=64),),
        ),
        optim=OptimConfig(lr=4e-4, warmup_steps=1000),
        train=TrainConfig(),
    )  # fmt: skip
