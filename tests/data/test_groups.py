"""Positions by key against a scan."""

from __future__ import annotations

import numpy as np
import pytest

from opengem.data.groups import Groups
from opengem.errors import UserError


@pytest.mark.parametrize("size", [0, 1, 500])
def test_positions_counts_and_last_ones_are_those_of_a_scan(size):
    rng = np.random.default_rng(size)
    column = rng.integers(0, 9, size)
    keys, start = rng.integers(0, 12, 80), rng.integers(0, size + 1, 80)  # some keys are not there
    end = np.maximum(start, rng.integers(0, size + 1, 80))
    groups = Groups(column)
    found = [s + np.flatnonzero(column[s:e] == key) for key, s, e in zip(keys, start, end, strict=True)]

    offsets, positions = groups.positions(keys, start, end)
    assert np.diff(offsets).tolist() == [len(f) for f in found] == groups.count(keys, start, end).tolist()
    assert positions.tolist() == [p for f in found for p in f.tolist()]
    if not size:
        return
    count, first, last = groups.seen(keys, end)
    for key, e, *got in zip(keys, end, count, first, last, strict=True):
        before = np.flatnonzero(column[:e] == key)
        assert got[0] == len(before) and (not len(before) or got[1:] == [before[0], before[-1]])


def test_no_questions_give_no_positions():
    none = np.zeros(0, np.int64)
    offsets, positions = Groups(np.arange(3)).positions(none, none, none)
    assert offsets.tolist() == [0] and positions.tolist() == []


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="number the ids from 0 without gaps"):
        Groups(np.array([0, 2**62]))
