"""`opengem data openbandit`: the small Open Bandit logs that the PyPI package obp ships, real impressions and clicks.

Six files of 10,000 impressions (three campaigns of a fashion shop, two policies), 24 to 30 November 2019, click rate
0.4 to 0.7 %: enough for plumbing and calibration, too few clicks to rank models by. Data: Saito et al., Open Bandit
Dataset and Pipeline, 2020 (https://github.com/st-tech/zr-obp, Apache-2.0).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from opengem.data.columns import running_sum
from opengem.data.files import readable
from opengem.data.schema import Baseline, Feature, Label, Schema, Stream
from opengem.data.store import Writer
from opengem.errors import UserError

CAMPAIGNS = ("all", "men", "women")
POLICIES = ("random", "bts")
TEST_START, END = 1_574_985_600, 1_575_158_400  # 2019-11-29 and 2019-12-01, UTC
PRIOR_CLICKS, PRIOR_VIEWS = 0.5, 100.0
PROFILE = tuple(f"user_feature_{i}" for i in range(4))


def build(
    out: Path, *, campaigns: tuple[Literal["all", "men", "women"], ...] = CAMPAIGNS,
    policies: tuple[Literal["random", "bts"], ...] = POLICIES, history: Literal["profile", "none"] = "profile",
    overwrite: bool = False) -> None:
    """Prepare the Open Bandit logs of the installed package obp (no download).

    out: folder of the data set to make.
    campaigns: which campaigns; their items are different and get different ids.
    policies: which logging policies, uniformly random or Bernoulli Thompson sampling.
    history: the logs hold no user id. "profile" gives each impression the earlier impressions of the same four hashed
        user features: the history of a cohort, not of a person. "none" makes a set without histories.
    overwrite: replace the data set in `out`.
    """
    table, items = _read(campaigns, policies)
    times = np.asarray(table["timestamp"]).astype("datetime64[s]").astype(np.int64)
    train = times < TEST_START
    item = np.asarray(table["item"])
    ids, rows = _encode(table, items, train)
    profiles, profile = np.unique(np.stack([ids[f] for f in PROFILE], 1), axis=0, return_inverse=True)
    click = np.asarray(table["click"]).astype(np.float32)
    columns = {
        "user": profile.reshape(-1),
        "timestamp": times,
        "item": item,
        **ids,
        "hour": times // 3600 % 24,
        "price": np.asarray(items["item_feature_0"])[item - 1].astype(np.float32),
        "affinity": np.log1p(np.asarray(table["affinity"])),
        "log_propensity": np.log(np.asarray(table["propensity_score"])),
        "item_ctr": _running_click_rate(item, times, click),
        "click": click,
    }
    schema = _schema(rows, len(items) + 1, history)
    with Writer(out, schema, overwrite) as writer:
        streams = {}
        if history == "profile":
            streams["shown"], columns["cut.shown"] = _cohorts(columns, len(profiles))
        writer.write_events(streams, np.arange(len(profiles)))
        writer.write_samples(columns)
    print(
        f"{len(times):,} impressions, {int(click.sum())} clicks ({click.mean():.2%}), {len(profiles)} profiles -> {out}"
    )


def _schema(rows: dict[str, int], num_items: int, history: str) -> Schema:
    item = Feature("item", "id", num_items, "item", "item")
    shown = Stream("shown", (item, Feature("position", "id", 4), Feature("click", "bits", 1)))
    roles = {**dict.fromkeys(PROFILE, "user"), **{f"item_feature_{i}": "item" for i in (1, 2, 3)}}
    features = (
        item,
        *(Feature(name, "id", size, role=roles.get(name, "context")) for name, size in rows.items()),
        Feature("hour", "id", 24),
        Feature("price", "dense", role="item"),
        Feature("affinity", "dense"),
        Feature("log_propensity", "dense", optional=True),
        Feature("item_ctr", "dense", optional=True),
    )
    return Schema(
        name="openbandit",
        streams=(shown,) if history == "profile" else (),
        features=features,
        labels=(Label("click"),),
        splits={"train": (0, TEST_START), "test": (TEST_START, END)},
        baselines=(Baseline("popularity", "logistic", ("item_ctr",)),),
        source="Open Bandit Dataset, small version in PyPI obp 0.4.1, Apache-2.0",
    )


def _read(campaigns: tuple[str, ...], policies: tuple[str, ...]) -> tuple[pa.Table, pa.Table]:
    """(impressions in time order, items); `item` counts from 1 over all chosen campaigns, row `item - 1` of items."""
    found = importlib.util.find_spec("obp")
    if found is None:
        raise UserError(
            "the Open Bandit logs come with the package obp, which is not installed: pip install obp==0.4.1"
        )
    if not campaigns or not policies:
        raise UserError("openbandit: campaigns and policies must each name at least one")
    folder = Path(found.submodule_search_locations[0]) / "dataset" / "obd"
    logs, items, first = [], [], 1
    for campaign in campaigns:
        context = _csv(folder / policies[0] / campaign / "item_context.csv")
        for policy in policies:
            log = _csv(folder / policy / campaign / f"{campaign}.csv")
            logs.append(_impressions(log, first, campaign=CAMPAIGNS.index(campaign), policy=POLICIES.index(policy)))
        items.append(context.select([n for n in context.column_names if n.startswith("item_feature")]))
        first += len(context)
    return pa.concat_tables(logs).sort_by("timestamp"), pa.concat_tables(items)


def _csv(path: Path) -> pa.Table:
    with readable(path):
        return pacsv.read_csv(path)


def _impressions(log: pa.Table, first: int, campaign: int, policy: int) -> pa.Table:
    """The columns that are kept of one file; `affinity` is that of the shown item."""
    item = np.asarray(log["item_id"])
    affinities = [n for n in log.column_names if n.startswith("user-item_affinity")]
    affinity = np.stack([np.asarray(log[n]) for n in affinities], 1)[np.arange(len(item)), item]
    kept = log.select(["timestamp", "position", "click", "propensity_score", *PROFILE])
    extra = {
        "item": item + first,
        "affinity": affinity,
        "campaign": np.full(len(item), campaign),
        "policy": np.full(len(item), policy),
    }
    for name, values in extra.items():
        kept = kept.append_column(name, pa.array(values))
    return kept


def _encode(table: pa.Table, items: pa.Table, train: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Hashed features as ids (0: not seen in training time) and numbered ones as they are; (values, rows)."""
    item = np.asarray(table["item"])
    ids = {n: np.asarray(table[n]) for n in ("position", "campaign", "policy")}
    rows = {"position": 4, "campaign": len(CAMPAIGNS), "policy": len(POLICIES)}
    for name in (*PROFILE, "item_feature_1", "item_feature_2", "item_feature_3"):
        text = table[name] if name in PROFILE else items[name].take(pa.array(item - 1))
        known = pc.unique(text.filter(pa.array(train)))
        ids[name] = np.asarray(pc.fill_null(pc.index_in(text, known), -1)) + 1
        rows[name] = len(known) + 1
    return ids, rows


def _running_click_rate(item: np.ndarray, times: np.ndarray, click: np.ndarray) -> np.ndarray:
    """Log of the item's click rate over earlier seconds, drawn towards a prior of half a click in a hundred views."""
    out = np.empty(len(item))
    for one in np.unique(item):
        at = np.flatnonzero(item == one)
        views = np.searchsorted(times[at], times[at])
        clicks = running_sum(click[at].astype(np.int64))[views]
        out[at] = np.log((clicks + PRIOR_CLICKS) / (views + PRIOR_VIEWS))
    return out


def _cohorts(columns: dict[str, np.ndarray], num_profiles: int) -> tuple[tuple[np.ndarray, dict], np.ndarray]:
    """((lengths, events by profile), cut of each impression: events of its profile in earlier seconds)."""
    profile, times = columns["user"], columns["timestamp"]
    order = np.argsort(profile, kind="stable")
    lengths = np.bincount(profile, minlength=num_profiles)
    offsets = running_sum(lengths)
    cut = np.empty(len(times), np.int64)
    for p in range(num_profiles):
        at = order[offsets[p] : offsets[p + 1]]
        cut[at] = np.searchsorted(times[at], times[at])
    events = {name: columns[name][order] for name in ("timestamp", "item", "position")}
    events["click"] = columns["click"][order].astype(np.int64)
    return (lengths, events), cut
