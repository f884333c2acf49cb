"""What a missing mechanism costs agrees with the oracle's own account, and every run of the table is a legal config."""

from __future__ import annotations

import json

import pytest

from benchmarks.mechanisms import MODULES, WHOLE, Arguments, config, joint_price, table
from opengem.data import synthetic


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mechanisms") / "data"
    synthetic.build(folder, users=2_000, samples=40_000, base_rate=0.2)
    return folder, json.loads((folder / "oracle.json").read_text())["labels"]["click"]


@pytest.mark.parametrize("mechanism", ["count", "cross", "bias"])
def test_the_price_of_one_mechanism_is_the_oracles(planted, mechanism):
    folder, oracle = planted
    price = 100 * (joint_price(folder, oracle, (mechanism,)) - 1)
    assert price == pytest.approx(oracle["splits"]["test"]["without"][mechanism]["price_percent"], rel=0.05)


def test_missing_nothing_costs_nothing_and_two_cost_more_than_one(planted):
    folder, oracle = planted
    assert joint_price(folder, oracle, ()) == pytest.approx(1)
    assert joint_price(folder, oracle, ("motif", "straddle")) > joint_price(folder, oracle, ("motif",)) > 1.01


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_taken_away(name, tmp_path):
    arguments = Arguments(out=tmp_path / "rows.jsonl")
    changed = config(name, arguments)
    assert (changed != config(WHOLE, arguments)) == (name != WHOLE)
    assert changed.model.streams[0].max_length == arguments.max_length


def test_the_table_holds_a_run_against_the_whole_model_and_the_oracle():
    rows = [{"mode": "strict", "impl": WHOLE, "ne": 0.8, "best_ne": 0.79, "price_percent": 0.0},
            {"mode": "strict", "impl": "edges", "ne": 0.82, "best_ne": 0.79, "price_percent": 2.6}]
    assert table(rows)[1].endswith("over whole +2.50 % (oracle +2.60 %)")
