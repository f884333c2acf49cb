"""What a training step eats: raw ids and numbers (`Batch`) and, after the embedding lookup, vectors (`Embedded`)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from opengem.errors import UserError
from opengem.jagged import Jagged


@dataclass(frozen=True)
class Batch:
    """`B` samples.

    sequences: "stream.attribute" -> Jagged over the sample's visible history, oldest first: int64 `[T]` for id and bits
        attributes, float32 `[T]` for dense ones, and "stream.timestamp" int64 `[T]` (seconds). All attributes of one
        stream share one `offsets` tensor.
    features: name -> int64 `[B]` (id, bits), float32 `[B]` (dense) or int64 Jagged (ids).
    labels: name -> float32 `[B]` in [0, 1], NaN where unknown. weights: float32 `[B]`, >= 0.
    timestamps: int64 `[B]`, request time.
    rows: int64 `[B]`, the sample's position in the data set (predictions are written in that order).
    An empty batch (B = 0) is legal.

    Where older events than those are counted (`StreamConfig.counted`), features hold their number as "stream.counted",
    int64 `[B]`, and sequences the times of those with the candidate's id, for each pair of an event attribute and a
    candidate's feature that share a table: "stream.counted.attribute.feature", int64.
    """

    sequences: dict[str, Jagged]
    features: dict[str, Jagged | Tensor]
    labels: dict[str, Tensor]
    weights: Tensor
    timestamps: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        size = self.batch_size
        for group in (self.sequences, self.features, self.labels):
            for name, value in group.items():
                count = value.batch_size if isinstance(value, Jagged) else value.shape[0]
                if count != size:
                    raise UserError(f"batch: {name!r} has {count} samples, the others have {size}")

    @property
    def batch_size(self) -> int:
        return self.timestamps.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on `device`; streams keep sharing one offsets tensor."""
        return self._apply(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._apply(Tensor.pin_memory)

    def _apply(self, move) -> Batch:
        done: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = move(tensor)
            return done[id(tensor)]

        def one(value):
            return value.moved(once) if isinstance(value, Jagged) else once(value)

        moved = {}
        for item in fields(self):
            value = getattr(self, item.name)
            moved[item.name] = {k: one(v) for k, v in value.items()} if isinstance(value, dict) else one(value)
        return Batch(**moved)


@dataclass(frozen=True)
class Embedded:
    """A batch after the lookup: what the model receives for ids.

    sequences: "stream.attribute" -> Jagged with values `[T, dim]` (id attributes only).
    features: name -> `[B, dim]` (id features; ids features sum-pooled).
    In training the values are leaf tensors that require a gradient: the embedding collection reads their `.grad`.
    """

    sequences: dict[str, Jagged]
    features: dict[str, Tensor]
