"""The next-basket task: from a log of purchases to samples with two labels, exact counts and no look ahead.

Every basket whose buyer has a history asks "which products?": the products bought are the positives of `click`, each
with a few negatives drawn by popularity from the log so far. `convert`, given `click`, is 1 when a coupon was redeemed
on that purchase or the buyer bought the product again within `Task.repurchase_days`.

Whatever describes a sample is computed from events STRICTLY before the basket's time: events that carry the same
timestamp are invisible, so a basket never sees itself. `convert` alone looks ahead: it is unknown (null) where its
window is still open when the split ends, so no training label is read from the test period.
Positives never sold before are dropped with their negatives: a negative always was, so the model could tell them apart.

Draws are hashes of (seed, buyer, time, place), not a stream of random numbers: a sample does not depend on later ones.
Read `impressions`, then `Counts.features`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from opengem.data.groups import Groups
from opengem.data.schema import Baseline, Feature, Label, Schema, Stream
from opengem.data.store import Writer
from opengem.errors import UserError

DAY = 86_400
NEVER = 8.0  # log(1 + days) of "never"; e^8 days are eight years
ROWS_PER_WRITE = 400_000

SIX = (
    "user_product_count",
    "user_product_days",
    "user_product_bought",
    "product_sold",
    "history",
    "user_product_share",
)


@dataclass(frozen=True)
class Task:
    """What becomes a sample. test_from: first second of the test split; min_log: events the log must exceed."""

    test_from: int
    min_log: int = 1_000
    max_positives: int = 20
    negatives: int = 4
    repurchase_days: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("min_log", "max_positives", "negatives", "repurchase_days"):
            low = 0 if name == "min_log" else 1
            if getattr(self, name) < low:
                raise UserError(f"{name.replace('_', '-')} = {getattr(self, name)}: must be at least {low}")


@dataclass(frozen=True)
class Log:
    """Purchased lines `[N]` in time order (`Log.sort`). Ids are dense: user in [0, num_users), product in
    [1, num_products) (0 is kept for "unknown"), basket numbered by time. All lines of a basket have one user and time.
    coupon: bool, a coupon was redeemed on the line.
    """

    user: np.ndarray
    time: np.ndarray
    basket: np.ndarray
    product: np.ndarray
    coupon: np.ndarray
    num_users: int
    num_products: int

    @classmethod
    def sort(cls, user, time, basket, product, coupon, num_users: int, num_products: int) -> tuple[Log, np.ndarray]:
        """The log in (time, basket) order, and the order `[N]` that brings other columns of the lines into it.

        Raises UserError when there is no line, or a basket has two users or two times.
        """
        if not len(time):
            raise UserError("purchases: no line is left after filtering; give a log with at least one purchase")
        order = np.lexsort((basket, time))
        user, time, basket, product = (np.asarray(x, np.int64)[order] for x in (user, time, basket, product))
        first = np.flatnonzero(np.diff(basket, prepend=basket[0] - 1))
        number = np.repeat(np.arange(len(first)), np.diff(first, append=len(basket)))
        torn = len(np.unique(basket)) != len(first) or (user != user[first][number]).any()
        if torn:
            raise UserError("purchases: a basket holds two buyers or two times; number such baskets apart")
        return cls(user, time, number, product, np.asarray(coupon, bool)[order], num_users, num_products), order

    @cached_property
    def first(self) -> np.ndarray:
        """Position of each basket's first line, `[number of baskets]`."""
        return np.flatnonzero(np.diff(self.basket, prepend=-1))

    @cached_property
    def buyer(self) -> np.ndarray:
        """The user of each basket."""
        return self.user[self.first]

    @cached_property
    def bought_at(self) -> np.ndarray:
        """The time of each basket."""
        return self.time[self.first]

    @cached_property
    def visible(self) -> np.ndarray:
        """Number of lines strictly before each basket's time: positions 0 to `visible` - 1 are its past."""
        return np.searchsorted(self.time, self.bought_at)

    def pair(self, user: np.ndarray, product: np.ndarray) -> np.ndarray:
        """One integer for a user (or basket) and a product."""
        return user * self.num_products + product


@dataclass(frozen=True)
class Offers:
    """What is advertised where and when, known before anybody buys.

    places: `[N]`, an integer for the place and time of each line, constant over a basket. pairs: `[K]` ascending, place
    and product (`Log.pair`) of everything advertised. columns: feature of the candidate -> `[K]` codes; 0 stands for
    what is not advertised.
    """

    places: np.ndarray
    pairs: np.ndarray
    columns: dict[Feature, np.ndarray]

    def features(self, pairs: np.ndarray) -> dict[str, np.ndarray]:
        """Feature name -> `[R]` codes of the pairs (place and product)."""
        if not len(self.pairs):
            return {feature.name: np.zeros_like(pairs) for feature in self.columns}
        at = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        found = self.pairs[at] == pairs
        return {feature.name: np.where(found, codes[at], 0) for feature, codes in self.columns.items()}


@dataclass(frozen=True)
class Shop:
    """A log and what is known of its lines, products and buyers: all that `write` needs.

    user_name: what a user is called; names: `[num_users]`, kept beside the histories.
    lines: event attribute -> `[N]`. products: attribute -> `[num_products]`, ids with 0 = unknown, shared by events and
    candidates. users: feature -> `[num_users]`. contexts: feature -> `[N]`, constant over a basket and known before it.
    counted: names of the three product attributes that the sixteen counts use. streams: further histories,
    stream -> (lengths `[num_users]`, columns), with a `timestamp` at which an event has become visible. offers: what is
    advertised, if that is known.
    """

    name: str
    source: str
    user_name: str
    names: np.ndarray
    log: Log
    lines: dict[Feature, np.ndarray]
    products: dict[Feature, np.ndarray]
    users: dict[Feature, np.ndarray]
    contexts: dict[Feature, np.ndarray]
    counted: tuple[str, str, str]
    streams: dict[Stream, tuple[np.ndarray, dict[str, np.ndarray]]] = field(default_factory=dict)
    offers: Offers | None = None


@dataclass(frozen=True)
class Impressions:
    """Samples `[R]` in time order: basket, candidate product, and the labels (float32; NaN: not known yet)."""

    basket: np.ndarray
    product: np.ndarray
    click: np.ndarray
    convert: np.ndarray


def uniform(seed: int, *parts: np.ndarray | int) -> np.ndarray:
    """A float64 in [0, 1) that is a fixed function of integers (the SplitMix64 mixer of Steele et al., 2014)."""
    state = np.uint64(seed)
    with np.errstate(over="ignore"):
        for part in parts:
            state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)) * 2.0**-53


def impressions(log: Log, task: Task) -> Impressions:
    """The samples of the task. Rows of a basket stand together: each positive is followed by its negatives."""
    contents, line = np.unique(log.pair(log.basket, log.product), return_inverse=True)
    coupon = np.bincount(line, log.coupon, len(contents)) > 0
    chosen, place = _positives(log, task, contents)
    basket, product = np.divmod(contents[chosen], log.num_products)

    horizon = log.bought_at + task.repurchase_days * DAY
    later = (np.searchsorted(log.time, end, side="right")[basket] for end in (log.bought_at, horizon))
    again = Groups(log.pair(log.user, log.product)).count(log.pair(log.buyer[basket], product), *later)
    ends = np.where(log.bought_at < task.test_from, task.test_from - 1, log.time[-1])
    converted = np.where(horizon <= ends, 0.0, np.nan)[basket] + (coupon[chosen] | (again > 0))

    slot = place[:, None] * task.negatives + np.arange(task.negatives)
    asking = np.broadcast_to(basket[:, None], slot.shape)
    negatives = _negatives(log, task, contents, asking.ravel(), slot.ravel()).reshape(slot.shape)
    products = np.column_stack([product, negatives])
    found = products > 0
    clicks = np.broadcast_to(np.arange(1 + task.negatives) == 0, products.shape)
    baskets = np.broadcast_to(basket[:, None], products.shape)
    labels = clicks.astype(np.float32), np.where(clicks, converted[:, None], 0.0).astype(np.float32)
    return Impressions(baskets[found], products[found], labels[0][found], labels[1][found])


def _positives(log: Log, task: Task, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positives: indices into `contents` (sorted distinct basket-product pairs) and each one's place in its basket.

    Only baskets that ask, only products sold before, at most `max_positives` of them in an order drawn at random.
    """
    basket, product = np.divmod(contents, log.num_products)
    asks = (log.visible > task.min_log) & (Groups(log.user).count(log.buyer, 0, log.visible) > 0)
    first_sale = np.full(log.num_products, len(log.time))
    np.minimum.at(first_sale, log.product, np.arange(len(log.time)))
    kept = np.flatnonzero(asks[basket] & (first_sale[product] < log.visible[basket]))
    basket, product = basket[kept], product[kept]
    order = np.lexsort((uniform(task.seed, log.buyer[basket], log.bought_at[basket], product), basket))
    place = np.arange(len(kept)) - np.searchsorted(basket, basket)
    inside = place < task.max_positives
    return kept[order][inside], place[inside]


def _negatives(log: Log, task: Task, contents: np.ndarray, basket: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """A product for each (basket, slot), drawn from the lines before the basket and not in it; 0 where none was found.

    A draw that hits the basket is repeated; 64 hits in a row mean a basket that holds all that was ever sold.
    """
    chosen, left = np.zeros(len(basket), np.int64), np.arange(len(basket))
    for attempt in range(64):
        asking = basket[left]
        number = uniform(task.seed + 1, log.buyer[asking], log.bought_at[asking], slot[left], attempt)
        product = log.product[(number * log.visible[asking]).astype(np.int64)]
        code = log.pair(asking, product)
        hit = contents[np.minimum(np.searchsorted(contents, code), len(contents) - 1)] == code
        chosen[left[~hit]] = product[~hit]
        left = left[hit]
        if not len(left):
            break
    return chosen


class Counts:
    """The sixteen counts of a (basket, candidate), from the log strictly before the basket: the six of `SIX`, a count
    and a recency for each of three product attributes, and four ages and trends of the product.

    `*_count`, `product_sold`, `history` are log(1 + n); `*_days` are log(1 + days since), NEVER where it never was.
    """

    def __init__(self, log: Log, attributes: dict[str, np.ndarray]) -> None:
        self.log, self.attributes = log, attributes
        self.recent = {days: np.searchsorted(log.time, log.bought_at - days * DAY) for days in (7, 28)}
        self.by_user, self.by_product = Groups(log.user), Groups(log.product)
        self.by_pair = Groups(log.pair(log.user, log.product))
        self.by_attribute = {
            name: Groups(log.user * self._span(name) + values[log.product]) for name, values in attributes.items()
        }

    def _span(self, name: str) -> int:
        return int(self.attributes[name].max()) + 1

    def features(self, basket: np.ndarray, product: np.ndarray) -> dict[str, np.ndarray]:
        """Feature name -> float32 `[R]`."""
        log = self.log
        user, before, time = log.buyer[basket], log.visible[basket], log.bought_at[basket]
        history = self.by_user.count(user, 0, before)
        count, _, last = self.by_pair.seen(log.pair(user, product), before)
        sold, first_sale, last_sale = self.by_product.seen(product, before)
        out = {
            "user_product_count": np.log1p(count),
            "user_product_days": self._days(time, last, count),
            "user_product_bought": count > 0,
            "product_sold": np.log1p(sold),
            "history": np.log1p(history),
            "user_product_share": count / np.maximum(history, 1),
        }
        for name, values in self.attributes.items():
            seen, _, last = self.by_attribute[name].seen(user * self._span(name) + values[product], before)
            out[f"user_{name}_count"], out[f"user_{name}_days"] = np.log1p(seen), self._days(time, last, seen)
        for days, start in self.recent.items():
            window = self.by_product.count(product, start[basket], before)
            out[f"product_trend_{days}d"] = np.log1p(window) - np.log1p(sold)
        out["product_last_sale_days"] = self._days(time, last_sale, sold)
        out["product_first_sale_days"] = self._days(time, first_sale, sold)
        return {name: values.astype(np.float32) for name, values in out.items()}

    def _days(self, now: np.ndarray, position: np.ndarray, count: np.ndarray) -> np.ndarray:
        then = self.log.time[np.clip(position, 0, len(self.log.time) - 1)]
        return np.where(count > 0, np.log1p(np.maximum(now - then, 0) / DAY), NEVER)


def count_names(attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the sixteen counts, the six first, in the order `Counts.features` gives them."""
    pairs = [f"user_{name}_{what}" for name in attributes for what in ("count", "days")]
    trends = ["product_trend_7d", "product_trend_28d", "product_last_sale_days", "product_first_sale_days"]
    return (*SIX, *pairs, *trends)


def splits(log: Log, task: Task) -> dict[str, tuple[int, int]]:
    """train up to `test_from`, test from there on."""
    start, end = int(log.time[0]), int(log.time[-1]) + 1
    if not start < task.test_from < end:
        raise UserError(
            f"purchases: the log runs {_date(start)} to {_date(end)}; test_from {_date(task.test_from)} leaves no "
            "train or no test split; move test_from"
        )
    return {"train": (start, task.test_from), "test": (task.test_from, end)}


def describe(shop: Shop, task: Task) -> Schema:
    """The schema of the data set that `write` makes."""
    names = count_names(shop.counted)
    log = shop.log
    product = Feature("product", rows=log.num_products, role="item")
    items = [product, *(replace(f, role="item") for f in shop.products)]
    buyer = Feature(shop.user_name, rows=log.num_users, role="user")
    roles = {"history": "user", **{name: "item" for name in names if name.startswith("product_")}}
    counts = [Feature(name, "dense", role=roles.get(name, "context"), optional=True) for name in names]
    offers = [replace(f, role="item", optional=True) for f in shop.offers.columns] if shop.offers else []
    baselines = {"trees_6": SIX, "trees_16": names}
    if offers:
        baselines[f"trees_{len(names) + len(offers)}"] = (*names, *(f.name for f in offers))
    purchases = Stream("purchase", (product, *shop.products, *shop.lines))
    return Schema(
        name=shop.name,
        source=shop.source,
        streams=(purchases, *shop.streams),
        features=(buyer, *(replace(f, role="user") for f in shop.users), *items, *shop.contexts, *counts, *offers),
        labels=(Label("click"), Label("convert", given="click")),
        splits=splits(log, task),
        baselines=(
            Baseline("popularity", "logistic", ("product_sold",)),
            *(Baseline(name, "trees", inputs) for name, inputs in baselines.items()),
        ),
    )


def write(out: Path, shop: Shop, task: Task, overwrite: bool = False) -> None:
    """Write the data set to `out` and print what it holds."""
    schema, rows = describe(shop, task), impressions(shop.log, task)
    histories = {"purchase": _history(shop)} | {s.name: history for s, history in shop.streams.items()}
    with Writer(out, schema, overwrite) as writer:
        writer.write_events(histories, shop.names)
        for columns in _samples(shop, rows, histories):
            writer.write_samples(columns)
    _summarise(shop, schema, rows)


def _history(shop: Shop) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    log = shop.log
    order = np.argsort(log.user, kind="stable")
    columns = {"timestamp": log.time, "product": log.product}
    columns |= {f.name: values[log.product] for f, values in shop.products.items()}
    columns |= {f.name: values for f, values in shop.lines.items()}
    return np.bincount(log.user, minlength=log.num_users), {name: values[order] for name, values in columns.items()}


def _samples(shop: Shop, rows: Impressions, histories: dict) -> Iterator[dict[str, np.ndarray]]:
    """Sample columns, `ROWS_PER_WRITE` rows at a time (the features of all rows at once would take gigabytes)."""
    log = shop.log
    by_name = {f.name: values for f, values in shop.products.items()}
    counts = Counts(log, {name: by_name[name] for name in shop.counted})
    cuts = {name: _cuts(log, lengths, columns["timestamp"]) for name, (lengths, columns) in histories.items()}
    for start in range(0, len(rows.basket), ROWS_PER_WRITE):
        part = slice(start, start + ROWS_PER_WRITE)
        basket, product = rows.basket[part], rows.product[part]
        user, line = log.buyer[basket], log.first[basket]
        columns = {"user": user, "timestamp": log.bought_at[basket]}
        columns |= {f"cut.{name}": cut[basket] for name, cut in cuts.items()}
        columns |= {shop.user_name: user, "product": product}
        columns |= {f.name: values[user] for f, values in shop.users.items()}
        columns |= {f.name: values[product] for f, values in shop.products.items()}
        columns |= {f.name: values[line] for f, values in shop.contexts.items()}
        columns |= counts.features(basket, product)
        if shop.offers:
            columns |= shop.offers.features(log.pair(shop.offers.places[line], product))
        columns |= {"click": rows.click[part], "convert": rows.convert[part]}
        yield columns


def _cuts(log: Log, lengths: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Events of the buyer strictly before each basket, `[number of baskets]`; `times` is grouped by user, in order."""
    start = min(int(times.min(initial=log.time[0])), int(log.time[0]))
    span = int(log.time[-1]) - start + 2
    codes = np.repeat(np.arange(len(lengths)), lengths) * span + np.minimum(times - start, span - 1)
    base = log.buyer * span
    return np.searchsorted(codes, base + log.bought_at - start) - np.searchsorted(codes, base)


def _summarise(shop: Shop, schema: Schema, rows: Impressions) -> None:
    log = shop.log
    print(f"{schema.name}: {schema.source}")
    print(f"  {log.num_users:,} {shop.user_name}s, {len(log.time):,} purchases of {log.num_products - 1:,} products")
    time = log.bought_at[rows.basket]
    for name, (start, end) in schema.splits.items():
        inside = (time >= start) & (time < end)
        clicks = rows.click[inside] > 0
        converted = rows.convert[inside][clicks]
        known = converted[~np.isnan(converted)]
        print(
            f"  {name:6s}{_date(start)} to {_date(end)}: {len(clicks):,} samples, {clicks.sum():,} clicks; of "
            f"{len(known):,} whose window has closed {known.mean() if len(known) else 0:.1%} convert"
        )


def clock(local: np.ndarray) -> dict[Feature, np.ndarray]:
    """Context features of local times in seconds: hour of the day, and weekday with Monday = 0."""
    return {Feature("hour", rows=24): local // 3_600 % 24, Feature("weekday", rows=7): (local // DAY + 3) % 7}


def seconds(day: str, option: str) -> int:
    """Seconds of the start of a day given as YYYY-MM-DD; anything else raises UserError naming the option."""
    try:
        return int(np.datetime64(day, "s").astype(np.int64))
    except ValueError as error:
        raise UserError(f"{option} = {day!r}: wanted a day as YYYY-MM-DD, for example 2017-11-01") from error


def _date(seconds: int) -> str:
    return str(np.datetime64(int(seconds), "s").astype("datetime64[D]"))
