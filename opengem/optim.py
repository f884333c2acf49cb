"""The dense optimiser and the learning-rate schedule.

Embedding tables update themselves (`sparse/`): their row-wise Adagrad is fused with the backward of the lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opengem.config import OptimConfig
from opengem.kernels.adamw.op import in_one_launch


def dense_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW's groups and state; weight decay only on matrices (not on biases, norms and learned tokens' gates)."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Factor on every learning rate at `step` (0-based): linear warm-up, then linearly to `final_lr_fraction`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    done = min(1.0, step / max(1, total_steps))
    return warm * (1.0 - (1.0 - config.final_lr_fraction) * done)


class Copies:
    """16-bit copies of the parameters of a model: they compute and get the gradients, the fp32 parameters learn."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.of = {p: torch.empty_like(p, dtype=dtype).requires_grad_(p.requires_grad) for p in model.parameters()}
        self.versions: list[tuple[int, int]] = []

    def named(self) -> dict[str, Tensor]:
        """Name -> copy; made anew if anything but `update` has written a parameter, or put another tensor in its place.

        What is written through `.data` leaves no trace: whoever does that sets `versions = []`.
        """
        versions = [(parameter._version, parameter.data_ptr()) for parameter in self.of]
        if versions != self.versions:
            with torch.no_grad():
                torch._foreach_copy_(list(self.of.values()), list(self.of))
            self.versions = versions
        return dict(zip(self.names, self.of.values(), strict=True))


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The global L2 norm of the dense gradients, fp32, 0-dim on the device."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))


def update(optimizer: torch.optim.AdamW, grads: dict[Tensor, Tensor], copies: Copies | None, lr: float, norm: Tensor,
           limit: float, skip: Tensor) -> None:
    """One step with gradients of norm `norm` clipped to `limit` (0: as they are); nothing where `skip` (0-dim) is 1.

    grads: parameter -> gradient. Clipping and the decision are made on the device; the host does not wait for it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if in_one_launch(norm.device):
        _update_in_one_launch(optimizer, grads, copies, norm, limit or float("inf"), skip)
        return
    for parameter, grad in grads.items():
        parameter.grad = grad
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else torch.ones_like(norm)
    optimizer.found_inf = skip
    optimizer.step()
    if copies is not None:
        copies.versions = []  # the fused step does not count as a write
    optimizer.zero_grad()
    del optimizer.grad_scale, optimizer.found_inf  # of this step alone


def _update_in_one_launch(optimizer, grads, copies, norm, limit, skip) -> None:
    from opengem.kernels.adamw.triton import adamw

    chosen = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for _, parameter in chosen:
        if not optimizer.state[parameter]:  # as torch makes it
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | zeros
    parameters, states = [parameter for _, parameter in chosen], [optimizer.state[p] for _, p in chosen]
    if not parameters:
        return
    group, steps = optimizer.param_groups[0], [state["step"] for state in states]
    torch._foreach_add_(steps, [1 - skip] * len(steps))  # one tensor for all would be read by the host
    step = steps[0].double()
    corrections = torch.stack([1 - beta**step for beta in group["betas"]]).float()  # a tensor of betas would be a sync
    adamw(
        parameters, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
        [grads[p] for p in parameters], None if copies is None else [copies.of[p] for p in parameters],
        tuple(g["weight_decay"] for g, _ in chosen), corrections, norm, skip, limit, group["lr"],
        group["betas"], group["eps"])
