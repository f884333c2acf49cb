"""From the last tokens to one logit a label. Read `towers.py` next."""

from __future__ import annotations

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Head(nn.Module):
    """Flattened, normalised tokens `[B, width]` -> hidden -> hidden / 2 -> one logit, float32 `[B]`.

    A label that is defined given another one gets its conditional logit here; the loss combines them.
    The last layer starts small, so that training starts near probability 1/2 without sharp opinions.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, hidden), nn.Linear(hidden, max(1, hidden // 2))])
        self.out = nn.Linear(max(1, hidden // 2), 1)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.out(x)[:, 0].float()

    def flops(self, rows: int) -> int:
        return 2 * rows * sum(layer.weight.numel() for layer in (*self.layers, self.out))
