"""The input pipeline: batch t + 2 is copied to the device and the ids of t + 1 are sent while t trains.

    for batch, embedded in Pipeline(loader, collection):
        ...                                   # dense forward, backward, collection.step(lr)

Only what needs no embedding row runs ahead: the lookup of a batch comes after the update of the one before it, so
results are bitwise those of the loop without a pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from opengem.data.batch import Batch, Embedded
from opengem.sparse.collection import Distributed, EmbeddingCollection


class Pipeline:
    """Yields (batch on the device, its Embedded) in the order of `batches`.

    On a GPU copies and id exchange run on a side stream. Over several processes every rank must yield the same number
    of batches; where one ends early all of them raise RuntimeError instead of waiting for each other.
    """

    def __init__(self, batches: Iterable[Batch], collection: EmbeddingCollection) -> None:
        self.batches, self.collection = batches, collection
        self.device = collection.device
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[Batch, Embedded]]:
        source = iter(self.batches)
        copied = self._copy(source)
        sent = self._distribute(copied)
        copied = self._copy(source)
        number = 0
        while sent is not None:
            batch, ids = sent
            self._join(batch, ids)
            embedded = self.collection.lookup(ids)
            sent = self._distribute(copied, number := number + 1)
            copied = self._copy(source) if copied is not None else None
            yield batch, embedded

    def _copy(self, source: Iterator[Batch]) -> Batch | None:
        batch = next(source, None)
        with self._aside():
            return batch.to(self.device, non_blocking=True) if batch is not None else None

    def _distribute(self, batch: Batch | None, number: int = 0) -> tuple[Batch, Distributed] | None:
        with self._aside():
            self._agree(batch is not None, number)
            return None if batch is None else (batch, self.collection.distribute(batch))

    def _agree(self, live: bool, number: int) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        votes = torch.tensor([int(live), int(not live)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        if votes.tolist() == [1, 1]:
            state = "has" if live else "has no"
            raise RuntimeError(
                f"ranks ran out of batches at different times: rank {dist.get_rank()} {state} batch {number}, another "
                "rank differs; give every rank the same number of batches (empty ones are fine)"
            )

    def _aside(self) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self.side) if self.side is not None else contextlib.nullcontext()

    def _join(self, batch: Batch, ids: Distributed) -> None:
        """Let the main stream wait for the side stream, and tell the allocator that it uses what was made there."""
        if self.side is None:
            return
        main = torch.cuda.current_stream(self.device)
        main.wait_stream(self.side)
        for tensor in _tensors((batch, ids)):
            tensor.record_stream(main)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(vars(value))
