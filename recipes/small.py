"""For one GPU: 75 million dense parameters, histories of up to 1,024 events."""

from __future__ import annotations

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, SparseConfig, StreamConfig, TrainConfig


def recipe() -> Config:
    """Four layers of width 256; about 3 GFLOP forward for a sample with two streams of 512 and 256 events."""
    return Config(
        name="small",
        data=DataConfig(batch_size=2048, eval_batch_size=2048, shuffle_rows=65_536),
        sparse=SparseConfig(dim=64, lr=0.5),
        model=ModelConfig(
            dim=256, heads=4, layers=4, schedule="GS", num_feature_tokens=64, num_summary=32, num_kv=64, seeds=64,
            counting_heads=1, pooled_tokens=16, recent_tokens=2, sumkron_rank=4, experts=2, fm_tokens=16,
            linear_tokens=16, fm_rank=16, expert_hidden=1024, head_hidden=256, feature_hidden=512, tower_dim=64,
            streams=(StreamConfig("*", max_length=1024, counted=4096, dim=256, heads=4, attention="block", window=64),),
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=200, final_lr_fraction=0.3),
        train=TrainConfig(),
    )  # fmt: skip
