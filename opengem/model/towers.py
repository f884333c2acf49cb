"""A user's and a candidate's vector, each from its own side alone; their inner product joins the first label's logit.

Since neither sees the other, every user of a batch can be held against every candidate of it, which is what
`loss.in_batch_softmax` does: the embedding tables learn from far more pairs than there are samples.
Sources: in-batch softmax of two towers, Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
recommendations", RecSys 2019; beside a ranking loss, the next action loss of TransAct V2 (arXiv 2506.02267).
Read `gem.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from opengem.data.batch import Embedded
from opengem.data.schema import Feature, Stream
from opengem.jagged import Jagged
from opengem.kernels.jagged_ops.op import segment_sum
from opengem.model.tokenizer import FeatureTokenizer, attribute_kinds


def user_features(features: list[Feature]) -> list[Feature]:
    """Features of role user, and ids of the context: its numbers and bits may describe the pair of user and candidate
    (how often this user bought this product), and would give the positive of a batch away."""
    return [f for f in features if f.role == "user" or (f.role == "context" and f.kind in ("id", "ids"))]


def item_features(features: list[Feature]) -> list[Feature]:
    return [f for f in features if f.role == "item"]


class Towers(nn.Module):
    """Two MLPs, of the user's side and of the candidate's.

    The user's side: `user_features`, and of every id attribute of every stream the sum of the history's embeddings over
    the square root of its length (zeros for an empty history). The candidate's: `item_features`. Match counts compare
    the two and belong to neither. Raises ValueError where a side has no input (`possible` tells).
    """

    def __init__(self, tokenizer: FeatureTokenizer, features: list[Feature], streams: Sequence[Stream],
                 dim: int, embedding_dim: int) -> None:
        super().__init__()
        if not self.possible(features, streams):
            raise ValueError("Towers: the user or the candidate has no feature")
        self.histories = [f"{s.name}.{a.name}" for s in streams for a in attribute_kinds(s, "id")]
        user, item = (tokenizer.places(side(features)) for side in (user_features, item_features))
        self.register_buffer("user", torch.tensor(user).long(), False)
        self.register_buffer("item", torch.tensor(item).long(), False)
        inputs = (len(user) + len(self.histories)) * embedding_dim, len(item) * embedding_dim
        self.user_tower, self.item_tower = (
            nn.Sequential(nn.Linear(width, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for width in inputs
        )

    @staticmethod
    def possible(features: list[Feature], streams: Sequence[Stream]) -> bool:
        """Whether both sides have an input."""
        has_user = bool(user_features(features)) or any(attribute_kinds(s, "id") for s in streams)
        return has_user and bool(item_features(features))

    def forward(self, vectors: Tensor, embedded: Embedded) -> tuple[Tensor, Tensor]:
        """(user, candidate), float32 `[B, dim]` each. vectors: `FeatureTokenizer.vectors`, `[B, count, E]`."""
        known = vectors.index_select(1, self.user).flatten(1)
        user = torch.cat([known, *[_history(embedded.sequences[name]) for name in self.histories]], 1)
        item = vectors.index_select(1, self.item).flatten(1)
        return self.user_tower(user).float(), self.item_tower(item).float()

    def flops(self, rows: int) -> int:
        layers = [layer for tower in (self.user_tower, self.item_tower) for layer in (tower[0], tower[2])]
        return 2 * rows * sum(layer.weight.numel() for layer in layers)


def _history(embeddings: Jagged) -> Tensor:
    """`[T, E]` to `[B, E]`: the sum over each history, divided by the square root of its length."""
    total = segment_sum(embeddings.values, embeddings.offsets)
    return total * embeddings.lengths.clamp(min=1).rsqrt()[:, None].to(total.dtype)
