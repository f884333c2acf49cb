"""The next-basket task against a slow recomputation, and proof that no sample looks ahead."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from opengem.data.next_basket import (
    DAY,
    NEVER,
    Counts,
    Log,
    Offers,
    Shop,
    Task,
    count_names,
    impressions,
    splits,
    uniform,
    write,
)
from opengem.data.schema import Baseline, Feature, Schema, Stream
from opengem.data.store import Events, Samples
from opengem.errors import UserError

TASK = Task(test_from=120 * DAY, min_log=30, max_positives=3, negatives=2, repurchase_days=20, seed=5)
ATTRIBUTES = ("type", "category", "maker")


def make_log(seed: int = 0, baskets: int = 220, users: int = 9, products: int = 25) -> Log:
    """Baskets of 1 to 7 lines; many share a timestamp, some of them with the same buyer; products repeat."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, baskets)
    time = rng.integers(0, 80, baskets) * 2 * DAY + rng.integers(0, 2, baskets) * 7_000
    basket = np.repeat(rng.permutation(baskets) + 1_000, lengths)
    total = len(basket)
    product = np.minimum(rng.geometric(0.12, total), products - 1)
    user = np.repeat(rng.integers(0, users, baskets), lengths)
    log, _ = Log.sort(user, np.repeat(time, lengths), basket, product, rng.random(total) < 0.1, users, products)
    return log


def make_shop(log: Log) -> Shop:
    rng = np.random.default_rng(1)
    sizes = {"type": 12, "category": 5, "maker": 4}
    products = {
        Feature(n, rows=k): np.concatenate([[0], rng.integers(0, k, log.num_products - 1)]) for n, k in sizes.items()
    }
    lengths = rng.integers(0, 5, log.num_users)
    times = np.concatenate([np.sort(rng.integers(0, 90, n) * 2 * DAY) for n in lengths])
    mail = {"timestamp": times, "letter": rng.integers(0, 3, len(times))}
    return Shop(
        name="toy",
        source="made up",
        user_name="household",
        names=np.arange(log.num_users),
        log=log,
        lines={Feature("quantity", "dense"): np.arange(len(log.time), dtype=np.float32)},
        products=products,
        users={Feature("age", rows=3): rng.integers(0, 3, log.num_users)},
        contexts={Feature("weekday", rows=7): log.time // DAY % 7},
        counted=ATTRIBUTES,
        streams={Stream("mail", (Feature("letter", rows=3),)): (lengths, mail)},
    )


def slow_impressions(log: Log, task: Task) -> list[tuple[int, int, float, float | None]]:
    """(basket, product, click, convert or None where unknown) by plain loops over all lines."""
    lines = list(
        zip(log.user.tolist(), log.time.tolist(), log.basket.tolist(), log.product.tolist(), log.coupon, strict=True)
    )
    rows = []
    for basket in sorted({line[2] for line in lines}):
        own = [line for line in lines if line[2] == basket]
        user, now = own[0][0], own[0][1]
        past = [line for line in lines if line[1] < now]
        horizon = now + task.repurchase_days * DAY
        is_open = horizon >= task.test_from if now < task.test_from else horizon > max(line[1] for line in lines)
        if len(past) <= task.min_log or not any(line[0] == user for line in past):
            continue
        bought = {line[3] for line in own}
        known = sorted(bought & {line[3] for line in past}, key=lambda p: float(uniform(task.seed, user, now, p)))
        for place, product in enumerate(known[: task.max_positives]):
            again = any(line[0] == user and line[3] == product and now < line[1] <= horizon for line in lines)
            convert = again or any(line[3] == product and line[4] for line in own)
            rows.append((basket, product, 1.0, None if is_open else float(convert)))
            for slot in range(place * task.negatives, (place + 1) * task.negatives):
                for attempt in range(64):
                    draw = float(uniform(task.seed + 1, user, now, slot, attempt))
                    negative = past[int(draw * len(past))][3]
                    if negative not in bought:
                        rows.append((basket, negative, 0.0, 0.0))
                        break
    return rows


def slow_counts(log: Log, shop: Shop, basket: int, product: int) -> dict[str, float]:
    now, user = log.bought_at[basket], log.buyer[basket]
    past = [i for i in range(len(log.time)) if log.time[i] < now]
    mine = [i for i in past if log.user[i] == user]
    values = {f.name: v for f, v in shop.products.items()}

    def days(lines: list[int], pick=max) -> float:
        return np.log1p((now - log.time[pick(lines)]) / DAY) if lines else NEVER

    same = [i for i in mine if log.product[i] == product]
    sold = [i for i in past if log.product[i] == product]
    out = {
        "user_product_count": np.log1p(len(same)),
        "user_product_days": days(same),
        "user_product_bought": float(len(same) > 0),
        "product_sold": np.log1p(len(sold)),
        "history": np.log1p(len(mine)),
        "user_product_share": len(same) / len(mine),
    }
    for name in ATTRIBUTES:
        alike = [i for i in mine if values[name][log.product[i]] == values[name][product]]
        out[f"user_{name}_count"], out[f"user_{name}_days"] = np.log1p(len(alike)), days(alike)
    for window in (7, 28):
        recent = [i for i in sold if log.time[i] >= now - window * DAY]
        out[f"product_trend_{window}d"] = np.log1p(len(recent)) - np.log1p(len(sold))
    return out | {"product_last_sale_days": days(sold), "product_first_sale_days": days(sold, min)}


def rows_of(log: Log, task: Task) -> list[tuple[int, int, float, float | None]]:
    found = impressions(log, task)
    convert = [None if np.isnan(value) else value for value in found.convert.tolist()]
    return list(zip(*(x.tolist() for x in (found.basket, found.product, found.click)), convert, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_samples_and_labels_match_plain_loops(seed):
    log = make_log(seed)
    rows = rows_of(log, TASK)
    assert rows == slow_impressions(log, TASK)
    assert {r[2:] for r in rows} == {(1.0, 1.0), (1.0, 0.0), (1.0, None), (0.0, 0.0)}


def test_counts_match_plain_loops():
    log = make_log()
    shop, found = make_shop(log), impressions(log, TASK)
    values = {f.name: v for f, v in shop.products.items()}
    fast = Counts(log, values).features(found.basket, found.product)
    assert tuple(fast) == count_names(ATTRIBUTES) and len(fast) == 16
    for row in range(0, len(found.basket), 3):
        slow = slow_counts(log, shop, found.basket[row], found.product[row])
        for name, value in slow.items():
            assert fast[name][row] == np.float32(value), (row, name)


def test_files_hold_strict_histories_and_disjoint_splits(tmp_path):
    log = make_log()
    shop = make_shop(log)
    write(tmp_path, shop, TASK)
    schema = Schema.load(tmp_path)
    events = Events.open(tmp_path, schema)
    rows = Samples.open(tmp_path, schema, events=events)
    columns = rows.read(0, rows.num_rows)
    for stream in ("purchase", "mail"):
        for row in range(rows.num_rows):
            user, now = columns["user"][row], columns["timestamp"][row]
            start, end = events.offsets[stream][user], events.offsets[stream][user + 1]
            times = events.columns[f"{stream}.timestamp"][start:end]
            assert columns[f"cut.{stream}"][row] == (times < now).sum()
    assert (columns["cut.purchase"] > 0).all()
    parts = {name: rows.split(name) for name in schema.splits}
    assert list(parts) == ["train", "test"]
    assert parts["train"][1] == parts["test"][0] and parts["test"][1] == rows.num_rows
    closes = columns["timestamp"] + TASK.repurchase_days * DAY
    known = ~np.isnan(columns["convert"]) & (columns["click"] > 0)
    train = np.arange(rows.num_rows) < parts["train"][1]
    assert closes[known & train].max() < TASK.test_from
    assert closes[known & ~train].max() <= log.time[-1]
    assert (known & train).any() and (known & ~train).any() and not known[columns["click"] > 0].all()


def test_offers_are_written_as_optional_features_of_the_candidate(tmp_path):
    log = make_log()
    places, advertised = log.basket % 3, np.array([[0, 4], [2, 1], [2, 5]])
    pairs = log.pair(advertised[:, 0], advertised[:, 1])
    shop = replace(make_shop(log), offers=Offers(places, pairs, {Feature("display", rows=8): np.array([7, 2, 3])}))
    write(tmp_path, shop, TASK)
    schema = Schema.load(tmp_path)
    assert Feature("display", rows=8, role="item", optional=True) in schema.features
    assert schema.baselines[-1] == Baseline("trees_17", "trees", (*count_names(ATTRIBUTES), "display"))
    samples = Samples.open(tmp_path, schema)
    shown = samples.read(0, samples.num_rows)["display"]
    rows = impressions(log, TASK)
    wanted = {(0, 4): 7, (2, 1): 2, (2, 5): 3}
    place = places[log.first[rows.basket]].tolist()
    assert shown.tolist() == [wanted.get(pair, 0) for pair in zip(place, rows.product.tolist(), strict=True)]
    assert set(shown) == {0, 2, 3, 7}


@pytest.mark.parametrize("change", ["products", "coupons", "removal"])
def test_later_and_simultaneous_events_change_labels_only(change):
    """Whatever happens at or after a basket's time leaves its rows as they are, apart from `convert`."""
    log = make_log()
    names = {f.name: v for f, v in make_shop(log).products.items()}
    asked = impressions(log, TASK).basket
    for basket in (asked[len(asked) // 3], asked[2 * len(asked) // 3]):
        now = log.bought_at[basket]
        foreign = (log.time >= now) & (log.basket != basket)
        product, coupon, kept = log.product.copy(), log.coupon.copy(), np.ones(len(foreign), bool)
        if change == "products":
            product[foreign] = 1 + (product[foreign] + 7) % (log.num_products - 1)
        elif change == "coupons":
            coupon ^= log.time >= now
        else:
            kept = ~foreign | (log.time == log.time[-1])
        other, _ = Log.sort(
            log.user[kept],
            log.time[kept],
            log.basket[kept],
            product[kept],
            coupon[kept],
            log.num_users,
            log.num_products,
        )
        before, after = (_rows_until(x, names, basket, now) for x in (log, other))
        assert len(before["product"]) > 10
        for name, values in before.items():
            np.testing.assert_array_equal(values, after[name], err_msg=name)


def _rows_until(log: Log, attributes: dict, basket: int, now: int) -> dict[str, np.ndarray]:
    """All columns but `convert` of the rows before `now` and of `basket` (found by its buyer and contents' time)."""
    found = impressions(log, TASK)
    times, users = log.bought_at[found.basket], log.buyer[found.basket]
    own = np.flatnonzero(found.basket == np.flatnonzero((log.bought_at == now) & _same(log, basket))[0])
    rows = np.concatenate([np.flatnonzero(times < now), own])
    columns = Counts(log, attributes).features(found.basket, found.product)
    columns |= {"product": found.product, "click": found.click, "time": times, "user": users}
    return {name: values[rows] for name, values in columns.items()}


def _same(log: Log, basket: int) -> np.ndarray:
    """Baskets with the lines of `basket` of the unchanged log."""
    original = make_log()
    wanted = original.product[original.basket == basket].tolist()
    same = [log.product[log.basket == b].tolist() == wanted for b in range(len(log.first))]
    return np.array(same) & (log.buyer == original.buyer[basket])


def test_negatives_follow_popularity():
    """One product makes up 60 % of the past, the others share the rest: the draws show it."""
    product = np.tile([1, 1, 1, 2, 3], 400)
    time = np.repeat(np.arange(400), 5) * 60
    product[-1], time[-1] = 3, 400 * DAY
    log, _ = Log.sort(np.zeros(2_000, int), time, np.arange(2_000), product, np.zeros(2_000, bool), 1, 4)
    found = impressions(log, replace(TASK, min_log=1_000))
    drawn = np.bincount(found.product[(found.click == 0) & (log.product[log.first][found.basket] == 3)], minlength=4)
    assert drawn[3] == 0 and abs(drawn[1] / drawn.sum() - 0.75) < 0.05


def test_basket_with_everything_ever_sold_has_no_negatives():
    time = np.array([0, 1, 2, 2, 400]) * DAY
    log, _ = Log.sort(np.zeros(5, int), time, [0, 1, 2, 2, 3], [1, 2, 1, 2, 1], np.zeros(5, bool), 1, 3)
    found = impressions(log, replace(TASK, min_log=0))
    assert [(b, p) for b, p in zip(found.basket, found.product, strict=True) if b == 2] in (
        [(2, 1), (2, 2)],
        [(2, 2), (2, 1)],
    )


def test_never_sold_products_are_dropped_with_their_negatives():
    log = make_log()
    found = impressions(log, TASK)
    first = np.full(log.num_products, len(log.time))
    np.minimum.at(first, log.product, np.arange(len(log.time)))
    assert (first[found.product] < log.visible[found.basket]).all()
    assert (np.bincount(found.basket, found.click == 0) == 2 * np.bincount(found.basket, found.click)).all()


def test_same_seed_same_bytes_other_seed_other_draws(tmp_path):
    shop = make_shop(make_log())
    digests = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write(tmp_path / name, shop, replace(TASK, seed=seed))
        files = sorted((tmp_path / name).rglob("*.parquet"))
        digests.append(hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_a_sample_does_not_depend_on_how_many_are_written_at_once(tmp_path, monkeypatch):
    shop = make_shop(make_log())
    read = []
    for name, size in (("whole", 10_000), ("pieces", 37)):
        monkeypatch.setattr("opengem.data.next_basket.ROWS_PER_WRITE", size)
        write(tmp_path / name, shop, TASK)
        rows = Samples.open(tmp_path / name, Schema.load(tmp_path / name))
        read.append(rows.read(0, rows.num_rows))
    for name, values in read[0].items():
        np.testing.assert_array_equal(values, read[1][name], err_msg=name)


@pytest.mark.parametrize("test_from", [0, 500 * DAY])
def test_a_split_that_would_be_empty_is_refused(test_from):
    with pytest.raises(UserError, match="move test_from"):
        splits(make_log(), replace(TASK, test_from=test_from))


def test_faulty_logs_and_options_are_refused():
    with pytest.raises(UserError, match="two buyers"):
        Log.sort([0, 1], [5, 5], [3, 3], [1, 1], [0, 0], 2, 2)
    with pytest.raises(UserError, match="two times"):
        Log.sort([0, 0, 0], [5, 6, 7], [3, 4, 3], [1, 1, 1], [0, 0, 0], 1, 2)
    with pytest.raises(UserError, match="no line is left"):
        Log.sort([], [], [], [], [], 0, 1)
    with pytest.raises(UserError, match="repurchase-days = 0"):
        replace(TASK, repurchase_days=0)
