"""A user's and a candidate's vector, each from the ids of its own side alone. For training only: no logit reads them.

Since neither sees the other side, every user of a batch can be held against every candidate of it, which is what
`loss.in_batch_softmax` does: the embedding tables, which the whole model reads, learn from far more pairs than samples.
Sources: in-batch softmax of two towers, Yi et al., "Sampling-bias-corrected neural modeling for large corpus
item recommendations", RecSys 2019; beside a ranking loss, the next action loss of TransAct V2 (arXiv 2506.02267).
Read `gem.py` next.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from opengem.data.batch import Embedded
from opengem.data.schema import Feature

SIDES = ("user", "context"), ("item",)  # roles; numbers and bits of the context may describe the pair, ids should not


class Towers(nn.Module):
    """Two MLPs, of the embedded ids of the user and the context, and of those of the candidate. Each needs one."""

    def __init__(self, features: list[Feature], dim: int, embedding_dim: int) -> None:
        super().__init__()
        self.user_ids, self.item_ids = sides(features)
        self.user, self.item = (
            nn.Sequential(nn.Linear(len(ids) * embedding_dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for ids in (self.user_ids, self.item_ids)
        )

    def forward(self, embedded: Embedded) -> tuple[Tensor, Tensor]:
        """(user, candidate), float32 `[B, dim]` each."""
        user, item = (
            tower(torch.cat([embedded.features[name] for name in ids], 1)).float()
            for tower, ids in ((self.user, self.user_ids), (self.item, self.item_ids))
        )
        return user, item

    def flops(self, rows: int) -> int:
        return 2 * rows * sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)


def sides(features: list[Feature]) -> tuple[list[str], list[str]]:
    """Names of the id features that (the user's tower, the candidate's tower) reads."""
    user, item = ([f.name for f in features if f.role in roles and f.kind in ("id", "ids")] for roles in SIDES)
    return user, item


def identities(features: list[Feature]) -> list[Feature]:
    """The id features that tell users apart (those of role user, which should not change for a user), and candidates:
    none that is optional, since what is on offer this week is a feature of the candidate but makes it no other one."""
    return [f for f in features if f.kind == "id" and f.role in ("user", "item") and not f.optional]
