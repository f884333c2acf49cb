"""The input pipeline: batch t + 2 is copied to the device and the ids of t + 1 are sent while t trains.

    pipeline = Pipeline(loader, collection)
    for batch, ids in pipeline:
        loss = loss_of(model(batch, collection.lookup(ids)))
        pipeline.ahead()                      # copies and ids of the next batches, under the dense work of this one
        loss.backward()
        collection.step(lr)

Results are bitwise those of the loop without a pipeline: a lookup comes after the update of the batch before it. Fully
sharded tables are read ahead as well, and the rows that the update then changes are read again (`fully_sharded_2d`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from opengem.data.batch import Batch
from opengem.sparse.collection import Distributed, EmbeddingCollection


class Pipeline:
    """Yields (batch on the device, its ids, distributed) in the order of `batches`.

    On a GPU copies, id exchange and reading ahead run on a side stream. The host waits there for how many ids will
    come, so call `ahead` when dense work is queued; the next iteration does it where it was not called.
    Over several processes every rank must yield the same number of batches; where one ends early all of them raise
    RuntimeError instead of waiting for each other. even: the numbers are known to be equal, so nobody asks.
    Tables must not be written between two batches but by `step`.
    """

    def __init__(self, batches: Iterable[Batch], collection: EmbeddingCollection, even: bool = False) -> None:
        self.source, self.collection, self.even = iter(batches), collection, even
        self.device = collection.device
        # Of high priority: a chain of short kernels waits between long ones anyway, and is to be first in line there.
        self.side = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self.updated: torch.cuda.Event | None = None  # on the main stream, behind the newest update
        self.number, self.copied, self.coming, self.is_ahead = 0, None, None, False
        self.current: Distributed | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Distributed]]:
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        self._copy()
        self.ahead()
        while self.coming is not None:
            batch, self.current = self.coming
            self._join(batch, self.current)
            self.is_ahead = False
            yield batch, self.current
            self.ahead()

    def ahead(self) -> None:
        """Distribute the ids of the next batch, read what can be read ahead, and copy the batch after it."""
        if self.is_ahead:
            return
        self.is_ahead, self.coming = True, None
        with self._aside():
            if not self.even:
                self._agree(self.copied is not None)
            if self.copied is not None:
                ids = self.collection.distribute(self.copied)
                if self.updated is not None:
                    self.side.wait_event(self.updated)
                self.coming = self.copied, self.collection.read_ahead(ids, self.current)
                self.number += 1
        self._copy()

    def _copy(self) -> None:
        batch = next(self.source, None)
        with self._aside():
            self.copied = batch.to(self.device, non_blocking=True) if batch is not None else None

    def _agree(self, live: bool) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        votes = torch.tensor([int(live), int(not live)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        if votes.tolist() == [1, 1]:
            state = "has" if live else "has no"
            raise RuntimeError(
                f"ranks ran out of batches at different times: rank {dist.get_rank()} {state} batch {self.number}, "
                "another rank differs; give every rank the same number of batches (empty ones are fine)"
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
        self.updated = main.record_event()


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
