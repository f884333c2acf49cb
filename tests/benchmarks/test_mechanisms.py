"""What a missing mechanism costs agrees with the oracle's own account, and every run of the table is a legal config."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.mechanisms import MODULES, WHOLE, Arguments, config, joint_price, price, table
from benchmarks.shares import Arguments as Run
from benchmarks.shares import Truth
from benchmarks.shares import main as train_and_score
from opengem.config import to_json
from opengem.data import synthetic


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mechanisms") / "data"
    synthetic.build(folder, users=2_000, samples=40_000, base_rate=0.2)
    return folder, json.loads((folder / "oracle.json").read_text())["labels"]["click"]


@pytest.mark.parametrize("mechanism", ["count", "cross", "bias"])
def test_the_price_of_one_mechanism_is_the_oracles(planted, mechanism):
    folder, oracle = planted
    price = 100 * (joint_price(folder, (mechanism,)) - 1)
    assert price == pytest.approx(oracle["splits"]["test"]["without"][mechanism]["price_percent"], rel=0.05)


def test_missing_nothing_costs_nothing_and_two_cost_more_than_one(planted):
    folder, _ = planted
    assert joint_price(folder, ()) == pytest.approx(1)
    assert joint_price(folder, ("motif", "straddle")) > joint_price(folder, ("motif",)) > 1.01


def test_the_price_of_a_module_counts_what_the_model_still_knows(planted):
    """Small tables keep some of the biases; the mean drift of the training split is worse than none at all, since the
    drift has turned when the test split begins."""
    folder, _ = planted
    assert price(folder, WHOLE) == pytest.approx(1)
    assert 1.01 < price(folder, "tables") < joint_price(folder, ("bias",))
    assert joint_price(folder, ("drift",)) < price(folder, "time_order")


def test_shares_are_those_of_the_logit(planted):
    folder, oracle = planted
    truth = Truth.of(folder)
    rows = np.arange(0, len(truth.p), 3)
    logits = np.log(truth.p / (1 - truth.p))[rows].astype(np.float64)
    scores = truth.scores(rows, logits, (np.random.default_rng(0).random(len(rows)) < truth.p[rows]).astype(float))
    assert scores["over_best_percent"] == pytest.approx(0, abs=1e-3)
    assert scores["found"] == pytest.approx(dict.fromkeys(oracle["weights"], 1.0), abs=0.01)
    half = truth.shares(rows, logits - 0.5 * oracle["weights"]["cross"] * truth.terms[rows, -3])
    assert half["cross"] == pytest.approx(0.5, abs=0.01) and half["bias"] == pytest.approx(1, abs=0.01)


def test_a_run_writes_shares_as_it_goes_and_scores_both_modes(planted, tmp_path):
    folder, oracle = planted
    small = config(WHOLE, Arguments(out=tmp_path, recipe="tiny", max_length=8, batch_size=2_048))
    (tmp_path / "small.json").write_text(to_json(small))
    train_and_score(Run(folder, tmp_path / "rows.jsonl", str(tmp_path / "small.json"), every=10))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["step"]) for row in rows] == [
        ("online", 10), ("online", 16), ("strict", 16), ("progressive", 20)
    ]
    assert rows[2]["rows"] == oracle["splits"]["test"]["label_rows"]
    assert rows[2]["ne"] > rows[2]["best_ne"] == pytest.approx(oracle["splits"]["test"]["label_ne"], rel=0.01)
    assert set(rows[2]["found"]) == set(oracle["weights"])


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_taken_away(name, tmp_path):
    arguments = Arguments(out=tmp_path / "rows.jsonl")
    changed = config(name, arguments)
    assert (changed != config(WHOLE, arguments)) == (name != WHOLE)
    assert changed.model.streams[0].max_length == arguments.max_length


def test_the_table_holds_a_run_against_the_whole_model_and_the_oracle():
    rows = [{"mode": "oracle", "impl": "interaction", "price_percent": 2.6},
            {"mode": "online", "impl": WHOLE, "ne": 0.9, "best_ne": 0.79},
            {"mode": "strict", "impl": WHOLE, "ne": 0.8, "best_ne": 0.79},
            {"mode": "strict", "impl": "interaction", "ne": 0.82, "best_ne": 0.79}]  # fmt: skip
    whole, without = table(rows)
    assert whole.endswith("over the best +1.27 %")
    assert without.endswith("over whole +2.50 % (oracle +2.60 %)")
