"""Who adds to dq when, in the Hopper backward: every block of a tile has one turn, and some block can always go on."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest

pytest.importorskip("triton")

QUERIES, KEYS = 64, 128
RULES = SimpleNamespace(maximum=max, minimum=min, constexpr=int, where=lambda which, a, b: a if which else b)


@pytest.fixture(scope="module")
def plain():
    """The kernel's own integer functions, run on Python integers."""
    from opengem.kernels.jfa import gluon_sm90_turns as kernels

    found = {"gl": RULES}
    for name in ("_low", "_high", "_rank", "_firsts_and_lasts"):
        found[name] = FunctionType(getattr(kernels, name).fn.__code__, found)
    return SimpleNamespace(**found)


def visits(plain, m, n, left, right, limit):
    """For each block of keys in the order of the queue: (query tile, rank, first, last) of each visit."""
    masks = left >= 0, right >= 0
    owners, tiles = -(-n // KEYS), -(-m // QUERIES)
    out = []
    for tile in reversed(range(owners)):
        low = plain._low(tile, n - m, right, tiles, masks[1], QUERIES, KEYS)
        high = plain._high(tile, n - m, left, tiles, masks[0], QUERIES, KEYS)
        begin = tile * tiles // owners if not any(masks) and owners <= limit else 0 if not any(masks) else low
        first_low, first_high, last_low, last_high = plain._firsts_and_lasts(
            tile, n, m, low, high, begin, limit, left, right, *masks, QUERIES, KEYS)
        order = [i if i < high else i - (high - low) for i in range(begin, begin + high - low)]
        out.append([(i, plain._rank(i, tile, n, m, limit, right, *masks, QUERIES, KEYS),
                     first_low <= i < first_high, last_low <= i < last_high) for i in order])
    return out


def samples():
    draw = random.Random(0)
    for _ in range(1500):
        m = draw.choice([draw.randint(1, 2000), draw.randint(1, 200)])
        n = draw.choice([m, draw.randint(1, 2000), draw.randint(1, 200)])
        yield m, n, draw.choice([-1, -1, 0, 50, 700]), draw.choice([-1, -1, 0, 0, 30, 500]), draw.choice([0, 4, 66])


def test_each_tile_is_summed_in_one_order(plain):
    for sample in samples():
        turns = {}
        for block in visits(plain, *sample):
            for i, *turn in block:
                turns.setdefault(i, []).append(turn)
        for i, found in turns.items():
            ranks = sorted(rank for rank, *_ in found)
            assert ranks == list(range(len(found))), (sample, i)
            assert all(first == (rank == 0) and last == (rank == len(found) - 1) for rank, first, last in found), sample


def test_blocks_that_run_at_once_never_wait_for_each_other_in_a_circle(plain):
    for sample in samples():
        blocks, done = visits(plain, *sample), {}
        while any(blocks):
            ready = [block for block in blocks if block and done.get(block[0][0], 0) == block[0][1]]
            assert ready, sample
            for block in ready:
                done[block[0][0]] = done.get(block[0][0], 0) + 1
                del block[0]


def test_blocks_wait_only_for_earlier_ones_where_not_all_may_run_at_once(plain):
    """With more blocks than `limit`, or a mask, a queue worked off in order by a single block must not stall."""
    for m, n, left, right, _ in samples():
        done = {}
        for block in visits(plain, m, n, left, right, 0):
            for i, rank, *_ in block:
                assert done.get(i, 0) == rank, (m, n, left, right)
                done[i] = rank + 1


def test_every_pair_that_may_see_each_other_is_visited(plain):
    for m, n, left, right, limit in samples():
        owners = -(-n // KEYS)
        seen = {(owners - 1 - at, i) for at, block in enumerate(visits(plain, m, n, left, right, limit))
                for i, *_ in block}
        for tile in range(owners):
            for i in range(-(-m // QUERIES)):
                low, high = i * QUERIES + n - m, min(i * QUERIES + QUERIES, m) - 1 + n - m
                after = right < 0 or tile * KEYS <= high + right
                before = left < 0 or min(tile * KEYS + KEYS, n) - 1 >= low - left
                assert (tile, i) in seen or not (after and before), (m, n, left, right)
