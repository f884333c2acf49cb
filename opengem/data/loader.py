"""Batches for training and evaluation: histories gathered by cut, global batches shared out over ranks, exact resume.

The order of rows depends on the seed alone, never on the batch size or the number of ranks. A position in that order
is therefore the whole state of a loader, and a run may resume on another number of ranks.
"""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opengem.config import DataConfig
from opengem.data.batch import Batch
from opengem.data.columns import Lists, nearest, running_sum, spans
from opengem.data.schema import Feature, Schema, matches
from opengem.data.store import ROW_GROUP, Events, Samples
from opengem.errors import UserError
from opengem.jagged import Jagged


def input_features(schema: Schema, config: DataConfig) -> list[Feature]:
    """Sample features the model receives: all that are not optional, and the optional ones the config names.

    A name in `optional_features` may be a pattern ("user_*"); one that fits no optional feature is a UserError, but for
    "*", all there are.
    """
    optional = [f.name for f in schema.features if f.optional]
    chosen: set[str] = set()
    for name in config.optional_features:
        found = fnmatch.filter(optional, name)
        if not found and name != "*":
            where = f"config data.optional_features: {name!r}"
            raise UserError(f"{where} is no optional feature of {schema.name!r}{nearest(name, optional)}")
        chosen.update(found)
    return [f for f in schema.features if not f.optional or f.name in chosen]


class Loader:
    """Iterates over the batches of one split, on the CPU (pinned when CUDA is there).

    max_lengths: stream -> newest visible events kept; streams not named are left out.
    counted: stream -> how many of the events before those are searched for the candidate's ids (see `Batch`).
    batch_size: rows of a global batch; rank `r` of `w` gets rows [n r / w, n (r + 1) / w) of its n. The last global
        batch holds what is left, so every rank yields the same number of batches and some may have zero rows.
    seed: order of rows when `config.shuffle_rows` > 0. limit_rows: use the first rows of the split only (0: all).
    events: histories already in memory (a second loader of the same folder should share the first one's `.events`).

    Iterating starts at the current position and, at the end, returns to the start of the next epoch (`.epoch`).
    A `Jagged` of the batch has the batch's own longest history as `max_length`.
    Raises UserError for every fault of the data, also when a background thread meets it.
    """

    def __init__(
        self, folder: Path | str, schema: Schema, config: DataConfig, *, max_lengths: dict[str, int], split: str,
        batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0, limit_rows: int = 0,
        events: Events | None = None, counted: dict[str, int] | None = None) -> None:
        if batch_size < 1 or not 0 <= rank < world_size or limit_rows < 0:
            raise ValueError(
                "Loader needs batch_size >= 1, 0 <= rank < world_size and limit_rows >= 0, got "
                f"batch_size {batch_size}, rank {rank}, world_size {world_size}, limit_rows {limit_rows}"
            )
        names = [s.name for s in schema.streams]
        if unknown := [s for s in max_lengths if s not in names]:
            raise UserError(f"data set {schema.name!r} has no stream {unknown[0]!r}{nearest(unknown[0], names)}")
        self._schema, self._config, self._max_lengths = schema, config, max_lengths
        self._counted = {stream: count for stream, count in (counted or {}).items() if count}
        self._features = input_features(schema, config)
        self._batch_size, self._rank, self._world_size, self._seed = batch_size, rank, world_size, seed
        self.events = Events.open(folder, schema, max_lengths) if events is None else events
        self._pairs = {stream: matches(schema.stream(stream), self._features) for stream in self._counted}
        for stream, pairs in self._pairs.items():
            for attribute, _ in pairs:
                self.events.groups(f"{stream}.{attribute.name}")  # here, since the threads would all make them
        self._samples = Samples.open(
            folder,
            schema,
            columns=self._columns(),
            events=self.events,
            cached_rows=2 * config.shuffle_rows + 4 * ROW_GROUP,
        )
        self._split, (self._first, last) = split, self._samples.split(split)
        self.num_rows = min(last - self._first, limit_rows or last - self._first)
        self.epoch = 0
        self._position = 0
        self._pin = torch.cuda.is_available()
        self._permutation = lru_cache(maxsize=4)(self._make_permutation)

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return -(-self.num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, ahead = self.epoch, self._position, self._config.prefetch
        positions = range(start, self.num_rows, self._batch_size)
        here = torch.cuda.current_device() if self._pin else -1  # threads would pin for device 0
        with ThreadPoolExecutor(min(ahead, 2) or 1, "loader", torch.cuda.set_device, (here,)) as pool:
            waiting: deque = deque()
            try:
                for i, position in enumerate(positions):
                    for p in positions[i + len(waiting) : i + max(ahead, 1)]:
                        waiting.append(pool.submit(self._batch, epoch, p))
                    batch = waiting.popleft().result()
                    self._position = min(position + self._batch_size, self.num_rows)
                    yield batch
            finally:
                for future in waiting:
                    future.cancel()
        self.epoch, self._position = epoch + 1, 0

    def state_dict(self) -> dict[str, int | str]:
        """The position: batches handed out are counted, prefetched ones are not."""
        return {"epoch": self.epoch, "row": self._position, **self._order()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where `state` was taken. A state of another order of rows is a UserError naming the difference."""
        for name, mine in self._order().items():
            if state.get(name) != mine:
                raise UserError(
                    f"cannot resume the data position: {name} was {state.get(name)!r} when it was saved and is now "
                    f"{mine!r}; use the same data set, split, seed and data.shuffle_rows"
                )
        if not 0 <= state["row"] <= self.num_rows:
            raise UserError(f"cannot resume the data position: row {state['row']} is outside 0 to {self.num_rows}")
        self.epoch, self._position = state["epoch"], state["row"]

    # ---- inside ----------------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        cuts = [f"cut.{s}" for s in self._max_lengths]
        given = [*self._features, *self._schema.labels]
        return ["user", "timestamp", "weight", *cuts, *(f.name for f in given)]

    def _order(self) -> dict[str, int | str]:
        """What fixes the order of rows."""
        return {
            "split": self._split,
            "num_rows": self.num_rows,
            "first_row": self._first,
            "seed": self._seed,
            "shuffle_rows": self._config.shuffle_rows,
        }

    def _rows(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Rows of the data set at positions [first, last) of an epoch."""
        positions = np.arange(first, last)
        window = self._config.shuffle_rows
        if not window or not len(positions):
            return self._first + positions
        parts = []
        for w in range(first // window, (last - 1) // window + 1):
            low, high = max(first - w * window, 0), min(last - w * window, window)
            parts.append(w * window + self._permutation(epoch, w)[low:high])
        return self._first + np.concatenate(parts)

    def _make_permutation(self, epoch: int, window: int) -> np.ndarray:
        size = min(self._config.shuffle_rows, self.num_rows - window * self._config.shuffle_rows)
        return np.random.default_rng([self._seed, epoch, window]).permutation(size)

    def _batch(self, epoch: int, position: int) -> Batch:
        """This rank's share of the global batch that starts at `position`."""
        size = min(self._batch_size, self.num_rows - position)
        first, last = (position + size * r // self._world_size for r in (self._rank, self._rank + 1))
        rows = self._rows(epoch, first, last)
        columns = self._samples.take(rows)
        features = {f.name: _tensor_or_jagged(columns[f.name]) for f in self._features}
        sequences: dict[str, Jagged] = {}
        for stream in self._max_lengths:
            sequences |= self._histories(stream, columns)
            if stream in self._counted:
                features[f"{stream}.counted"], found = self._matches(stream, columns)
                sequences |= found
        batch = Batch(
            sequences=sequences,
            features=features,
            labels={label.name: torch.from_numpy(columns[label.name]) for label in self._schema.labels},
            weights=torch.from_numpy(columns["weight"]),
            timestamps=_tensor(columns["timestamp"]),
            rows=torch.from_numpy(rows),
        )
        return batch.pin_memory() if self._pin else batch

    def _histories(self, stream: str, columns: dict) -> dict[str, Jagged]:
        """The newest visible events of each sample, every attribute over one offsets tensor."""
        cuts = columns[f"cut.{stream}"]
        lengths = np.minimum(cuts, self._max_lengths[stream])
        offsets = running_sum(lengths)
        index = spans(self.events.offsets[stream][columns["user"]] + cuts - lengths, lengths, offsets)
        shared, max_length = torch.from_numpy(offsets), int(lengths.max(initial=0))
        attributes = (a.name for a in self._schema.stream(stream).attributes)
        names = [f"{stream}.{name}" for name in ("timestamp", *attributes)]
        return {name: Jagged(_tensor(self.events.columns[name].take(index)), shared, max_length) for name in names}

    def _matches(self, stream: str, columns: dict) -> tuple[Tensor, dict[str, Jagged]]:
        """How many events before those are searched, and the times of the ones that have the candidate's id."""
        before = np.maximum(columns[f"cut.{stream}"] - self._max_lengths[stream], 0)
        end = self.events.offsets[stream][columns["user"]] + before
        start = end - np.minimum(before, self._counted[stream])
        found = {}
        for attribute, feature in self._pairs[stream]:
            groups = self.events.groups(f"{stream}.{attribute.name}")
            offsets, at = groups.positions(columns[feature.name].astype(np.int64), start, end)
            times = Lists(offsets, self.events.columns[f"{stream}.timestamp"].take(at))
            found[f"{stream}.counted.{attribute.name}.{feature.name}"] = _tensor_or_jagged(times)
        return torch.from_numpy(end - start), found


def _tensor(values: np.ndarray) -> torch.Tensor:
    """Ids and times as int64, numbers as float32."""
    return torch.from_numpy(values if values.dtype == np.float32 else values.astype(np.int64, copy=False))


def _tensor_or_jagged(values: np.ndarray | Lists) -> torch.Tensor | Jagged:
    if not isinstance(values, Lists):
        return _tensor(values)
    longest = int(np.diff(values.offsets).max(initial=0))
    return Jagged(_tensor(values.values), torch.from_numpy(values.offsets), longest)
