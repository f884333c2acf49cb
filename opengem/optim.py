"""The dense optimiser, the learning-rate schedule and the check before a step.

Embedding tables update themselves (`sparse/`): their row-wise Adagrad is fused with the backward of the lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opengem.config import OptimConfig


def dense_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay only on matrices (not on biases, norms and learned tokens' gates)."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=device.type == "cuda" or None
    )


def rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Factor on every learning rate at `step` (0-based): linear warm-up, then linearly to `final_lr_fraction`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    done = min(1.0, step / max(1, total_steps))
    return warm * (1.0 - (1.0 - config.final_lr_fraction) * done)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """The global L2 norm of the dense gradients before clipping to `limit` (0: only measured), on the device."""
    return nn.utils.clip_grad_norm_(model.parameters(), limit if limit > 0 else float("inf"))
