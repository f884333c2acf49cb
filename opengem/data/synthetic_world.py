"""The world behind the synthetic data: users, items, event histories with planted motifs, and who saw which ad when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 64
ACTIONS, MOTIF = 8, (6, 5, 7)
"""action ids; a, b, c of the motif. a and c occur only in planted triples, b anywhere, so counts tell nothing."""
SEGMENTS, INTERESTS, ADVERTISERS = 64, 4, 8
SIGN_CHANCE = 0.75
"""P(sign = +1): uneven, so that lower orders of the cross show first and gradient descent finds the way to order 4"""
GAP_SIGMA = 1.5
"""standard deviation of the log of a gap between events"""
WEEK = 7 * 86_400
SPAN = 5 * WEEK
"""seconds of history; impressions happen in the last WEEK"""


@dataclass(frozen=True)
class World:
    """What is drawn once: users, items, and every history, flat and oldest first."""

    offsets: np.ndarray
    columns: dict[str, np.ndarray]
    inside: np.ndarray
    """running sum over events of the motif signs that end there, blocks' insides; `[T + 1]`"""
    across: np.ndarray
    """the same for motifs across an edge"""
    inside_seen: np.ndarray
    across_seen: np.ndarray
    interests: np.ndarray
    segment: np.ndarray
    user_sign: np.ndarray
    ad_sign: np.ndarray
    advertiser: np.ndarray
    segment_bias: np.ndarray
    item_bias: np.ndarray
    categories: int


def make_world(lengths: np.ndarray, categories: int, items: int, mechanisms: tuple[str, ...], rng) -> World:
    users, offsets = len(lengths), running_sum(lengths)
    user = np.repeat(np.arange(users), lengths)
    interests = rng.integers(0, categories, (users, INTERESTS))
    category = _sticky_categories(user, offsets, interests, categories, rng)
    action = rng.integers(0, MOTIF[1] + 1, len(user))
    inside = _plant(action, lengths, offsets, False, rng) if "motif" in mechanisms else np.zeros(len(user), np.int8)
    across = _plant(action, lengths, offsets, True, rng) if "straddle" in mechanisms else np.zeros(len(user), np.int8)
    columns = {
        "timestamp": _event_times(lengths, offsets, rng),
        "item": category + categories * rng.integers(0, items // categories, len(user)),
        "category": category,
        "action": action,
    }
    item_bias = rng.normal(size=(items // categories, categories))
    return World(
        offsets=offsets,
        columns=columns,
        inside=running_sum(inside),
        across=running_sum(across),
        inside_seen=running_sum(np.abs(inside)),
        across_seen=running_sum(np.abs(across)),
        interests=interests,
        segment=rng.integers(0, SEGMENTS, users),
        user_sign=_signs(users, rng),
        ad_sign=_signs(items, rng),
        advertiser=rng.permutation(items) % ADVERTISERS,
        segment_bias=rng.normal(size=SEGMENTS),
        item_bias=(item_bias - item_bias.mean(0)).ravel(),
        categories=categories,
    )


def _sticky_categories(user, offsets, interests, categories: int, rng) -> np.ndarray:
    """Sessions of one category: half of the events repeat the one before, the others mostly draw an interest."""
    weights = rng.exponential(size=interests.shape)
    edges = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
    slot = (rng.random(len(user))[:, None] > edges[user, :-1]).sum(1)
    draw = np.where(rng.random(len(user)) < 0.9, interests[user, slot], rng.integers(0, categories, len(user)))
    fresh = rng.random(len(user)) < 0.5
    fresh[offsets[:-1][offsets[:-1] < offsets[1:]]] = True
    return draw[np.maximum.accumulate(np.where(fresh, np.arange(len(user)), 0))]


def _event_times(lengths, offsets, rng) -> np.ndarray:
    """Log-normal gaps, scaled so that every user's history fills the span; int64 seconds in [0, SPAN).

    Bursts keep most neighbours close in time: the order of a motif shows in the sequence more than in the clock.
    """
    gaps = running_sum(rng.lognormal(0, GAP_SIGMA, offsets[-1]))
    first = gaps[offsets[:-1]]
    total = gaps[offsets[1:]] - first + rng.lognormal(0, GAP_SIGMA, len(lengths))
    since = gaps[1:] - np.repeat(first, lengths)
    return np.floor(SPAN * since / np.repeat(total, lengths)).astype(np.int64)


def _plant(action: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, across: bool, rng) -> np.ndarray:
    """Write one motif or its reverse into every block, or over every block edge; returns the sign, at its last event.

    Motifs stay two events clear of each other: closer ones could form a third with a chance b between them.
    """
    blocks = -(-lengths // BLOCK)
    user = np.repeat(np.arange(len(lengths)), blocks)
    begin = BLOCK * (np.arange(len(user)) - np.repeat(np.cumsum(blocks) - blocks, blocks))
    length = lengths[user]
    if across:
        start, fits = begin - rng.integers(1, 3, len(user)), (begin > 0) & (length >= begin + 2)
    else:
        low, high = begin + 4, np.minimum(begin + BLOCK - 7, length - 3)
        start, fits = low + np.floor(rng.random(len(user)) * (high - low + 1)).astype(np.int64), high >= low
    sign = rng.choice(np.array([-1, 1], np.int8), len(user))[fits]
    at = (offsets[user] + start)[fits]
    a, b, c = MOTIF
    action[at], action[at + 1], action[at + 2] = np.where(sign > 0, a, c), b, np.where(sign > 0, c, a)
    signs = np.zeros(len(action), np.int8)
    signs[at + 2] = sign
    return signs


def noise_stream(lengths, world: World, rng) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    item = rng.integers(0, len(world.advertiser), lengths.sum())
    times = _event_times(lengths, running_sum(lengths), rng)
    return lengths, {"timestamp": times, "item": item, "category": item % world.categories}


def impressions(world: World, samples: int, rng) -> dict[str, np.ndarray]:
    """Who saw which ad when, in time order. Three of four ads come from the user's interests."""
    users, items, categories = len(world.segment), len(world.advertiser), world.categories
    user = rng.integers(0, users, samples)
    slot = rng.integers(0, INTERESTS, samples)
    category = np.where(rng.random(samples) < 0.75, world.interests[user, slot], rng.integers(0, categories, samples))
    moment = np.sort(rng.integers(SPAN - WEEK, SPAN, samples))
    return {
        "user": user,
        "timestamp": moment,
        "category": category,
        "item": category + categories * rng.integers(0, items // categories, samples),
        "device_sign": _signs(samples, rng),
        "surface_sign": _signs(samples, rng),
        "cut": cuts(world.offsets, world.columns["timestamp"], user, moment),
    }


def cuts(offsets, times, user, moment) -> np.ndarray:
    """Events strictly before the moment of each sample."""
    key = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) * SPAN + times
    return np.searchsorted(key, user * SPAN + moment) - offsets[user]


def category_history(world: World, sample) -> tuple[np.ndarray, np.ndarray]:
    """Per sample: visible events of the ad's category, and seconds since the last of them (inf when none)."""
    lengths = np.diff(world.offsets)
    width = int(lengths.max(initial=0)) + 1
    user = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(user)) - world.offsets[user]
    key = np.sort((user * world.categories + world.columns["category"]) * width + position)
    base = (sample["user"] * world.categories + sample["category"]) * width
    first, last = np.searchsorted(key, base), np.searchsorted(key, base + sample["cut"])
    count = last - first
    seen = count > 0
    gap = np.full(len(base), np.inf)
    event = world.offsets[sample["user"][seen]] + key[last[seen] - 1] % width
    gap[seen] = sample["timestamp"][seen] - world.columns["timestamp"][event]
    return count, gap


def visible(running: np.ndarray, world: World, sample) -> np.ndarray:
    """Increase of a running sum over events, over each sample's visible history."""
    begin = world.offsets[sample["user"]]
    return running[begin + sample["cut"]] - running[begin]


def _signs(count: int, rng) -> np.ndarray:
    return (rng.random(count) < SIGN_CHANCE).astype(np.int64)


def running_sum(values: np.ndarray) -> np.ndarray:
    kind = np.float64 if values.dtype.kind == "f" else np.int64
    return np.concatenate([np.zeros(1, kind), np.cumsum(values, dtype=kind)])
