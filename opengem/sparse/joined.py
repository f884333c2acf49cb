"""Several embedding collections over different tables as one, where tables are kept in different ways."""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.data.batch import Batch, Embedded
from opengem.sparse.collection import Distributed, EmbeddingCollection
from opengem.sparse.plan import Plan


class JoinedCollections:
    """The methods of `EmbeddingCollection`; what they mean is written there. parts: no table is in two of them."""

    def __init__(self, parts: list[EmbeddingCollection]) -> None:
        self.parts, self.device = parts, parts[0].device
        self.plan: Plan | None = None

    def __call__(self, batch: Batch) -> Embedded:
        return self.lookup(self.distribute(batch))

    def distribute(self, batch: Batch) -> list[Distributed]:
        return [part.distribute(batch) for part in self.parts]

    def read_ahead(self, ids: list[Distributed], current: list[Distributed] | None) -> list[Distributed]:
        now = current or [None] * len(ids)
        return [part.read_ahead(*own) for part, *own in zip(self.parts, ids, now, strict=True)]

    def lookup(self, ids: list[Distributed]) -> Embedded:
        sequences, features = {}, {}
        for part, own in zip(self.parts, ids, strict=True):
            found = part.lookup(own)
            sequences |= found.sequences
            features |= found.features
        return Embedded(sequences, features)

    def finite(self) -> Tensor:
        return torch.stack([part.finite() for part in self.parts]).all()

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        for part in self.parts:
            part.step(lr, skip)

    def discard(self) -> None:
        for part in self.parts:
            part.discard()

    def check(self) -> None:
        for part in self.parts:
            part.check()

    def collisions(self, batch: Batch) -> dict[str, tuple[int, int]]:
        return {name: found for part in self.parts for name, found in part.collisions(batch).items()}

    def reinitialise(self, seed: int) -> None:
        for part in self.parts:
            part.reinitialise(seed)

    def num_bytes(self) -> int:
        return sum(part.num_bytes() for part in self.parts)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return _merged([part.state_dict() for part in self.parts])

    def gather(self) -> dict[str, dict[str, Tensor]]:
        return _merged([part.gather() for part in self.parts])

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for part in self.parts:
            part.load_state_dict(state)


def _merged(states: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    return {kind: {name: x for state in states for name, x in state[kind].items()} for kind in states[0]}
