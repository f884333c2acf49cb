"""Synthetic impressions with planted mechanisms and a known best possible NE.

The logit of a click is `b + sum_k a_k f_k`; every `f_k` has mean 0 and variance 1, is (nearly) independent of the
others and is a function of what a model sees. docs/synthetic.md defines the terms and says what a finite sample allows.

| mechanism | f_k                                                                     | what finds it                  |
|-----------|-------------------------------------------------------------------------|--------------------------------|
| count     | log(1 + events of the ad's category in the WHOLE history)               | pooling over the whole history |
| recency   | exp(-dt / tau) to the last event of that category                       | event time                     |
| motif     | actions a, b, c in a row (+1) or c, b, a (-1), inside one block         | order within a block           |
| straddle  | the same three events lying across the edge of two blocks               | attention across block edges   |
| cross     | product of four signs: user's, ad's, device's, surface's                | order-4 interaction            |
| bias      | user segment + ad                                                       | embedding tables               |
| drift     | slow sinusoid in time, one phase an advertiser                          | training in time order         |

Blocks hold 64 events and are counted from the user's first event. No history is longer than `max_length`, so these are
also the blocks of a model that keeps the newest `max_length` events or more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opengem.data import lengths as length_laws
from opengem.data.oracle import Term, auc, cross_entropy, entropy, intercept, normalised_entropy, sigmoid, without
from opengem.data.schema import Baseline, Feature, Label, Schema, Stream
from opengem.data.store import Writer
from opengem.data.synthetic_world import (
    ACTIONS,
    ADVERTISERS,
    BLOCK,
    MOTIF,
    SEGMENTS,
    SPAN,
    WEEK,
    World,
    category_history,
    cuts,
    impressions,
    make_world,
    noise_stream,
    running_sum,
    visible,
)
from opengem.errors import UserError

MECHANISMS = ("count", "recency", "motif", "straddle", "cross", "bias", "drift")
SHARES = {
    "click": {"count": 0.35, "recency": 0.3, "motif": 0.55, "straddle": 0.2, "cross": 0.3, "bias": 0.35, "drift": 0.25},
    "convert": {"count": 0.3, "recency": -0.2, "motif": 0.2, "straddle": 0.1, "cross": -0.15, "bias": 0.25,
                "drift": 0.1},
}  # fmt: skip
"""label -> mechanism -> share of the logit's variance, with the sign of its weight. A motif weighs the same wherever it
lies, so motif and straddle share the sum of their two entries as the histories decide."""

EXTRA_STREAMS = ("impressions", "searches", "organic")
ABLATION_ROWS = 50_000
"""rows of a split over which missing mechanisms are priced"""


@dataclass(frozen=True)
class Head:
    """One label: its chance is p = sigmoid(logit) and logit = intercept + sum of weights x terms, `[N]`."""

    intercept: float
    weights: dict[str, float]
    logit: np.ndarray

    @property
    def p(self) -> np.ndarray:
        return sigmoid(self.logit)


def build(
    out: Path, *, users: int = 10_000, samples: int = 200_000, lengths: str = "lognormal(64)", max_length: int = 128,
    base_rate: float = 0.05, strength: float = 1.5, convert_rate: float = 0.2, convert_strength: float = 1.0,
    mechanisms: tuple[str, ...] = MECHANISMS, categories: int = 16, items: int = 256, streams: int = 1,
    recency_s: float = 0, seed: int = 0, overwrite: bool = False) -> None:
    """Write a synthetic data set whose best possible NE is known.

    Beside it go oracle.json (best NE, price of each mechanism) and oracle.parquet (the truth, for evaluation only).

    Args:
        out: folder to make.
        users: number of users, each with one history.
        samples: number of impressions, even over users and over a week; the last fifth is the test split.
        lengths: law of the history length, e.g. lognormal(64), fill(0.5), zipf(1.2), retail, kuairand1k.
        max_length: longest history; use a model that keeps at least this many events.
        base_rate: mean click probability.
        strength: standard deviation of the click logit (0.5 weak, 1.5 as in ads, 3 strong).
        convert_rate: mean probability of a conversion given a click.
        convert_strength: standard deviation of the conversion logit.
        mechanisms: which of count, recency, motif, straddle, cross, bias, drift are planted.
        categories: number of item categories.
        items: number of items, a multiple of categories.
        streams: event streams, 1 to 4; mechanisms live in the first, the others are noise.
        recency_s: time constant of recency in seconds (0: four mean gaps between events).
        seed: same seed, same files.
        overwrite: replace a data set that is already in OUT.
    """
    start = time.monotonic()
    _check(users, samples, base_rate, strength, convert_rate, convert_strength, mechanisms, categories, items, streams)
    law = length_laws.parse(lengths)
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3 + len(EXTRA_STREAMS))]
    world = make_world(law.draw(users, max_length, rngs[0]), categories, items, mechanisms, rngs[0])
    sample = impressions(world, samples, rngs[1])
    recency_s = recency_s or 4 * SPAN * users / max(1, int(world.offsets[-1]))
    dense = _dense(world, sample, recency_s)
    terms, constants = _terms(world, sample, dense, mechanisms)
    click = _head("click", terms, base_rate, strength)
    heads = {"click": click, "convert": _head("convert", terms, convert_rate, convert_strength, click.p)}
    labels = _labels(heads, rngs[2])
    names = EXTRA_STREAMS[: streams - 1]
    extra = {n: noise_stream(law.draw(users, max_length, r), world, r) for n, r in zip(names, rngs[3:], strict=False)}
    schema = _schema(categories, items, streams)
    _write_data(out, schema, world, sample | dense, labels, extra, overwrite)
    facts = {"seed": seed, "lengths": lengths, "max_length": max_length, "recency_s": recency_s, "terms": constants}
    _write_oracle(Path(out), facts | _report(schema, heads, terms, sample["timestamp"], labels), heads, terms)
    print(f"{out}: {samples:,} samples, {world.offsets[-1]:,} events, {time.monotonic() - start:.1f} s")


def _check(users, samples, base_rate, strength, convert_rate, convert_strength, mechanisms, categories, items, streams):
    def require(holds: bool, name: str, value, rule: str) -> None:
        if not holds:
            raise UserError(f"data synthetic: {name} = {value!r} {rule}")

    for name, value in (("users", users), ("samples", samples)):
        require(value >= 1, name, value, "must be at least 1")
    for name, value in (("base-rate", base_rate), ("convert-rate", convert_rate)):
        require(0 < value < 1, name, value, "must lie between 0 and 1, for example 0.05")
    for name, value in (("strength", strength), ("convert-strength", convert_strength)):
        require(value > 0, name, value, "must be above 0, for example 1.5")
    unknown = [m for m in mechanisms if m not in MECHANISMS]
    require(not unknown and len(mechanisms) > 0, "mechanisms", mechanisms, f"must be some of {', '.join(MECHANISMS)}")
    require(categories >= 2, "categories", categories, "must be at least 2")
    require(items >= categories and items % categories == 0, "items", items, f"must be a multiple of {categories}")
    require(1 <= streams <= 1 + len(EXTRA_STREAMS), "streams", streams, f"must be 1 to {1 + len(EXTRA_STREAMS)}")


def _schema(categories: int, items: int, streams: int) -> Schema:
    item = Feature("item", rows=items, table="item")
    category = Feature("category", rows=categories, table="category")
    extra = tuple(Stream(name, (item, category)) for name in EXTRA_STREAMS[: streams - 1])
    dense = ("history_length", "category_count", "category_recency")
    features = (
        Feature("item", rows=items, table="item", role="item"),
        Feature("category", rows=categories, table="category", role="item"),
        Feature("advertiser", rows=ADVERTISERS, role="item"),
        Feature("ad_sign", rows=2, role="item"),
        Feature("segment", rows=SEGMENTS, role="user"),
        Feature("user_sign", rows=2, role="user"),
        Feature("device_sign", rows=2),
        Feature("surface_sign", rows=2),
        Feature(dense[0], kind="dense", role="user"),
        *(Feature(name, kind="dense", optional=True) for name in dense[1:]),
    )
    end = SPAN - WEEK // 5
    return Schema(
        name="synthetic",
        streams=(Stream("history", (item, category, Feature("action", rows=ACTIONS))), *extra),
        features=features,
        labels=(Label("click"), Label("convert", given="click")),
        splits={"train": (0, end), "test": (end, SPAN)},
        baselines=(Baseline("trees on counts", "trees", dense),),
        source="generated: docs/synthetic.md",
    )


def _dense(world: World, sample, recency_s: float) -> dict[str, np.ndarray]:
    """The dense features: log(1 + visible events), log(1 + those of the ad's category), exp(-dt / recency_s)."""
    count, gap = category_history(world, sample)
    return {
        "history_length": np.log1p(sample["cut"]),
        "category_count": np.log1p(count),
        "category_recency": np.exp(-gap / recency_s),
    }


def _terms(world: World, sample, dense, mechanisms: tuple[str, ...]) -> tuple[dict[str, Term], dict]:
    """The standardised terms, and the constants that define them (written to oracle.json)."""
    fits = {}
    raw = {
        "count": _residual("count", fits, dense["category_count"], [dense["history_length"]]),
        "recency": _residual(
            "recency", fits, dense["category_recency"], [dense["category_count"], dense["history_length"]],
            where=dense["category_count"] > 0,
        ),
        "motif": visible(world.inside, world, sample).astype(np.float64),
        "straddle": visible(world.across, world, sample).astype(np.float64),
        "bias": world.segment_bias[world.segment[sample["user"]]] + world.item_bias[sample["item"]],
        "drift": _drift(sample["timestamp"], world.advertiser[sample["item"]]),
    }  # fmt: skip
    signs = [world.user_sign[sample["user"]], world.ad_sign[sample["item"]]]
    signs += [sample["device_sign"], sample["surface_sign"]]
    raw["cross"] = np.prod([2.0 * sign - 1 for sign in signs], axis=0)
    coins = {
        "motif": visible(world.inside_seen, world, sample),
        "straddle": visible(world.across_seen, world, sample),
    }
    terms = {}
    for name in mechanisms:
        centre = 0.0 if name in coins else float(raw[name].mean())
        scale = float(np.sqrt(np.mean((raw[name] - centre) ** 2)))
        if scale < 1e-9:
            raise UserError(f"data synthetic: mechanism {name} never varies in these histories; {_mend(name)}")
        terms[name] = Term((raw[name] - centre) / scale, scale, coins.get(name))
        fits[name] = {"centre": centre, "scale": scale, "fit": fits.get(name, [])}
    constants = {name: fits[name] for name in mechanisms}
    return terms, constants | {"segment": world.segment_bias.tolist(), "item": world.item_bias.tolist()}


def _drift(moment: np.ndarray, advertiser: np.ndarray) -> np.ndarray:
    """Half a period over the week. The phases are even, so mean and variance over advertisers never change."""
    return np.sin(np.pi * (moment - (SPAN - WEEK)) / WEEK + 2 * np.pi * advertiser / ADVERTISERS)


def _residual(name: str, fits: dict, target: np.ndarray, known: list[np.ndarray], where=None) -> np.ndarray:
    """`target` less its quadratic regression on `known` (whose coefficients go to `fits`); 0 outside `where`.

    So a term tells nothing, to second order, of what is known without it.
    """
    where = np.ones(len(target), bool) if where is None else where
    columns = [np.ones(len(target)), *known]
    columns += [a * b for i, a in enumerate(known) for b in known[i:]]
    basis = np.stack(columns, 1)[where]
    fit = np.linalg.lstsq(basis, target[where], rcond=None)[0]
    fits[name] = fit.tolist()
    result = np.zeros(len(target))
    result[where] = target[where] - basis @ fit
    return result


def _labels(heads: dict[str, Head], rng) -> dict[str, np.ndarray]:
    count = len(heads["click"].logit)
    click = rng.random(count) < heads["click"].p
    convert = click & (rng.random(count) < heads["convert"].p)
    return {"click": click.astype(np.float32), "convert": convert.astype(np.float32)}


def _mend(name: str) -> str:
    need = {"motif": 7, "straddle": BLOCK + 2}.get(name, 1)
    return f"use histories of more than {need} events (--lengths, --max-length), more samples, or leave {name} out"


def _head(label: str, terms: dict[str, Term], rate: float, strength: float, weight=None) -> Head:
    """`weight`: the chance that the label is defined."""
    shares = {name: SHARES[label][name] for name in terms}
    total = sum(abs(share) for share in shares.values())
    weights = {name: np.sign(share) * np.sqrt(abs(share) / total) for name, share in shares.items()}
    if {"motif", "straddle"} <= set(terms):
        pair = terms["motif"].scale, terms["straddle"].scale
        each = np.sqrt((shares["motif"] + shares["straddle"]) / total / (pair[0] ** 2 + pair[1] ** 2))
        weights["motif"], weights["straddle"] = each * pair[0], each * pair[1]
    score = sum(weights[name] * term.value for name, term in terms.items())
    scale = strength / score.std()
    base = intercept(scale * score, rate, weight)
    weights = {name: float(scale * value) for name, value in weights.items()}
    return Head(base, weights, base + scale * score)


def _write_data(out: Path, schema: Schema, world: World, sample, labels, extra, overwrite: bool) -> None:
    with Writer(out, schema, overwrite=overwrite) as writer:
        histories = {"history": (np.diff(world.offsets), world.columns), **extra}
        writer.write_events(histories, np.arange(len(world.segment)))
        for columns in _rows(world, sample, labels, extra):
            writer.write_samples(columns)


def _rows(world: World, sample, labels, extra) -> Iterator[dict[str, np.ndarray]]:
    """Columns of the samples, 2^18 rows at a time."""
    for first in range(0, len(sample["user"]), 1 << 18):
        part = slice(first, first + (1 << 18))
        user, item = sample["user"][part], sample["item"][part]
        columns = {name: sample[name][part] for name in sample if name != "cut"}
        columns |= {
            "cut.history": sample["cut"][part],
            "advertiser": world.advertiser[item],
            "segment": world.segment[user],
            "user_sign": world.user_sign[user],
            "ad_sign": world.ad_sign[item],
        }
        for name, (lengths, flat) in extra.items():
            columns[f"cut.{name}"] = cuts(running_sum(lengths), flat["timestamp"], user, sample["timestamp"][part])
        yield columns | {name: values[part] for name, values in labels.items()}


def _report(schema: Schema, heads: dict[str, Head], terms: dict[str, Term], times: np.ndarray, labels) -> dict:
    """The scores in oracle.json."""
    bounds = {name: np.searchsorted(times, span).tolist() for name, span in schema.splits.items()}
    report = {"block": BLOCK, "motif": MOTIF, "mechanisms": list(terms)}
    report |= {"rows": {name: last - first for name, (first, last) in bounds.items()}}
    report["labels"] = {}
    for label in schema.labels:
        defined = labels[label.given] > 0 if label.given else np.ones(len(times), bool)
        train = slice(*bounds["train"])
        base_rate = _mean(labels[label.name][train], defined[train])
        report["labels"][label.name] = {
            "given": label.given,
            "train_base_rate": base_rate,
            "intercept": heads[label.name].intercept,
            "weights": heads[label.name].weights,
            "splits": {
                name: _expected(label, heads, terms, np.arange(*span))
                | _observed(label, heads, labels, defined, slice(*span), base_rate)
                for name, span in bounds.items()
            },
        }
    return report


def _expected(label: Label, heads: dict[str, Head], terms: dict[str, Term], rows: np.ndarray) -> dict:
    """Best NE, and what each missing mechanism costs, over all labels that could have been drawn."""
    if not len(rows):
        return {}
    head, given = heads[label.name], heads.get(label.given)
    p, weight = head.p[rows], given.p[rows] if given else None
    ne = normalised_entropy(p, weight=weight)
    step = max(1, len(rows) // ABLATION_ROWS)
    some, p, weight = rows[::step], p[::step], weight[::step] if given else None
    best, missing = normalised_entropy(p, weight=weight), {}
    for name, term in terms.items():
        condition = (given.logit, given.weights[name]) if given else None
        q = without(term, head.logit, head.weights[name], some, condition)
        ratio = normalised_entropy(p, q, weight) / best
        missing[name] = {"ne": ne * ratio, "price_percent": 100 * (ratio - 1)}
    return {"ne": ne, "without": missing}


def _observed(label: Label, heads: dict[str, Head], labels, defined, part: slice, base_rate: float | None) -> dict:
    """How the true probabilities score on the labels that were drawn, as a model's predictions would be scored."""
    known = defined[part]
    truth, p = labels[label.name][part][known], heads[label.name].p[part][known]
    if not len(truth):
        return {"label_rows": 0}
    loss = cross_entropy(truth, p)
    return {
        "label_rows": len(truth),
        "label_rate": float(truth.mean()),
        "label_logloss": float(loss.mean()),
        "label_logloss_se": float(loss.std() / np.sqrt(len(loss))),
        "label_ne": float(loss.mean() / entropy(base_rate)) if base_rate and base_rate < 1 else None,
        "label_auc": auc(truth, p) if 0 < truth.mean() < 1 else None,
    }


def _write_oracle(out: Path, report: dict, heads: dict[str, Head], terms: dict[str, Term]) -> None:
    (out / "oracle.json").write_text(json.dumps(report, indent=1) + "\n")
    columns = {f"p.{label}": head.p for label, head in heads.items()}
    columns |= {f"term.{name}": term.value for name, term in terms.items()}
    table = pa.table({name: pa.array(values.astype(np.float32)) for name, values in columns.items()})
    pq.write_table(table, out / "oracle.parquet", compression="zstd")
    for label, facts in report["labels"].items():
        test = facts["splits"]["test"]
        if test.get("without"):
            prices = ", ".join(f"{name} {cost['price_percent']:.1f} %" for name, cost in test["without"].items())
            print(f"{label}: best possible test NE {test['ne']:.4f}; price of missing {prices}")


def _mean(values: np.ndarray, where: np.ndarray) -> float | None:
    return float(values[where].mean()) if where.any() else None
