"""The dense optimiser, the learning-rate schedule and the check before a step.

Embedding tables update themselves (`sparse/`): their row-wise Adagrad is fused with the backward of the lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opengem.config import OptimConfig


def dense_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay only on matrices (not on biases, norms and learned tokens' gates)."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Factor on every learning rate at `step` (0-based): linear warm-up, then linearly to `final_lr_fraction`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    done = min(1.0, step / max(1, total_steps))
    return warm * (1.0 - (1.0 - config.final_lr_fraction) * done)


def gradient_norm(model: nn.Module) -> Tensor:
    """The global L2 norm of the dense gradients, 0-dim on the device."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def update(optimizer: torch.optim.AdamW, lr: float, norm: Tensor, limit: float, skip: Tensor) -> None:
    """One step with gradients of norm `norm` clipped to `limit` (0: as they are); nothing where `skip` (0-dim) is 1.

    Both are done inside the optimiser's kernel (the hooks that gradient scaling uses): no pass over the gradients to
    clip them, and no wait for the device to decide.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
    optimizer.found_inf = skip
    optimizer.step()
