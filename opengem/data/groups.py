"""Where a key stands in a long column: how often, where last, and all places of it, found by halving and not a scan."""

from __future__ import annotations

import numpy as np

from opengem.data.columns import running_sum, spans
from opengem.errors import UserError


class Groups:
    """Positions of a column (int64 `[T]`, every key >= 0) grouped by key: one sorted int64 a position.

    Every question is asked for N keys at once (int64 `[N]`). The largest key times T must stay below 2^63 (UserError).
    """

    def __init__(self, keys: np.ndarray) -> None:
        self.stride = len(keys) + 1  # positions run from 0 to len(keys)
        if len(keys) and (int(keys.max()) + 1) * self.stride >= 2**63:
            raise UserError(
                f"{len(keys):,} ids of at most {keys.max():,} cannot be indexed: their product must stay below 2^63; "
                "number the ids from 0 without gaps"
            )
        self.codes = keys * self.stride + np.arange(len(keys))
        self.codes.sort()

    def count(self, keys: np.ndarray, start: np.ndarray | int, end: np.ndarray) -> np.ndarray:
        """Positions start <= p < end of each key, int64."""
        low, high = self._between(keys, start, end)
        return high - low

    def seen(self, keys: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count, first and last position of each key before `end`; positions mean nothing at count 0."""
        base = keys * self.stride
        low, high = self._between(keys, 0, end)
        first = self.codes[np.minimum(low, len(self.codes) - 1)] - base
        last = self.codes[np.maximum(high - 1, 0)] - base
        return high - low, first, last

    def positions(self, keys: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(offsets int64 `[N + 1]`, positions): of each of the N keys, ascending, those with start <= p < end."""
        low, high = self._between(keys, start, end)
        lengths = high - low
        offsets = running_sum(lengths)
        found = self.codes[spans(low, lengths, offsets)]
        found -= np.repeat(keys * self.stride, lengths)
        return offsets, found

    def _between(self, keys: np.ndarray, start: np.ndarray | int, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        base = keys * self.stride
        return np.searchsorted(self.codes, base + start), np.searchsorted(self.codes, base + end)
