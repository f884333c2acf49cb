"""Open Bandit: the set equals the shipped logs, and nothing of an impression's own second is in its history."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from opengem.data import openbandit
from opengem.data.schema import Schema
from opengem.data.store import Events, Samples
from opengem.errors import UserError


@pytest.mark.skipif(importlib.util.find_spec("obp") is None, reason="the package obp is not installed")
class TestShipped:
    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("openbandit") / "set"
        openbandit.build(folder)
        schema = Schema.load(folder)
        events = Events.open(folder, schema)
        samples = Samples.open(folder, schema, events=events)
        return samples, events, samples.read(0, samples.num_rows)

    def test_counts_and_splits(self, made):
        samples, events, rows = made
        assert samples.num_rows == 60_000 and int(rows["click"].sum()) == 287
        assert samples.split("train") == (0, 43_569) and samples.split("test") == (43_569, 60_000)
        assert np.unique(rows["item"]).tolist() == list(range(1, 161))
        assert int(events.columns["shown.click"].sum()) == 287

    def test_a_history_is_the_cohort_before_this_second(self, made):
        _, events, rows = made
        for row in (0, 1_234, 59_999):
            same = rows["user"] == rows["user"][row]
            earlier = same & (rows["timestamp"] < rows["timestamp"][row])
            assert rows["cut.shown"][row] == earlier.sum()
            start = events.offsets["shown"][rows["user"][row]]
            visible = slice(start, start + rows["cut.shown"][row])
            assert events.columns["shown.item"][visible].tolist() == rows["item"][earlier].tolist()

    def test_running_click_rate_knows_only_the_past(self, made):
        rows = made[2]
        for row in (0, 777, 50_000):
            earlier = (rows["item"] == rows["item"][row]) & (rows["timestamp"] < rows["timestamp"][row])
            rate = (rows["click"][earlier].sum() + 0.5) / (earlier.sum() + 100)
            assert rows["item_ctr"][row] == pytest.approx(np.log(rate), rel=1e-5)

    def test_one_campaign_without_histories(self, tmp_path):
        openbandit.build(tmp_path / "men", campaigns=("men",), policies=("bts",), history="none")
        schema = Schema.load(tmp_path / "men")
        rows = Samples.open(tmp_path / "men", schema).read(0, 10_000)
        assert schema.streams == () and int(rows["click"].sum()) == 69
        assert set(rows["campaign"]) == {1} and set(rows["policy"]) == {1} and rows["item"].max() == 34


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install obp"):
        openbandit.build(tmp_path / "set")
