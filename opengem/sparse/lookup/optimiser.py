"""What an update does to a row, given the sum of its gradients in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("sgd", "adagrad", "adam")


@dataclass(frozen=True)
class Optimiser:
    """A row-wise optimiser; only rows that were looked up change.

    sgd: w -= lr g.
    adagrad: v += mean(g²); w -= lr g / (sqrt(moment_scale v) + eps), v one float32 a row. moment_scale 1 is exact
        row-wise Adagrad. Below 1 it enlarges the steps: with averaged copies a row that one of M copies saw moves 1 / M
        as far, which the momentum-scaled row-wise Adagrad of two-dimensional sparse parallelism (arXiv 2508.03854)
        answers by rescaling the moment; the factor is the user's choice.
    adam: m = b1 m + (1 - b1) g for each element; v = b2 v + (1 - b2) mean(g²) for each row; both bias-corrected by the
        number of steps of the table. Rows that are not looked up do not decay.
    """

    kind: str = "adagrad"
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    moment_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"sparse optimiser {self.kind!r}: wanted one of {', '.join(KINDS)}")

    def state(self, rows: int, dim: int, device: torch.device | str) -> dict[str, Tensor]:
        """Zero state of a matrix: "moment" float32 `[rows]` (adagrad, adam), "mean" float32 `[rows, dim]` (adam)."""
        state = {}
        if self.kind != "sgd":
            state["moment"] = torch.zeros(rows, dtype=torch.float32, device=device)
        if self.kind == "adam":
            state["mean"] = torch.zeros(rows, dim, dtype=torch.float32, device=device)
        return state

    def corrections(self, step: int) -> tuple[float, float]:
        """Adam's bias corrections at step 1, 2, ..."""
        return 1 - self.betas[0] ** step, 1 - self.betas[1] ** step
