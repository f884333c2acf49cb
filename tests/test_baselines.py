"""Baselines: fitted on the train split, scored on whole splits, conditional labels only where they are defined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opengem import baselines
from opengem.data.schema import Baseline, Feature, Label, Schema, Stream
from opengem.data.store import Writer
from opengem.errors import UserError

TREES = Baseline("trees", "trees", ("signal", "noise"))
POPULARITY = Baseline("popularity", "logistic", ("noise",))
SCHEMA = Schema(
    name="toy",
    streams=(Stream("view", (Feature("item", rows=3),)),),
    features=(Feature("signal", "dense"), Feature("noise", "dense", optional=True)),
    labels=(Label("click"), Label("convert", given="click")),
    splits={"train": (0, 6_000), "validation": (6_000, 7_000), "test": (7_000, 10_000)},
    baselines=(POPULARITY, TREES),
)


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch):
    monkeypatch.setitem(baselines.TREES, "max_iter", 20)


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    signal, noise = rng.normal(size=(2, 10_000)).astype(np.float32)
    click = rng.random(10_000) < 1 / (1 + np.exp(2 - 3 * np.abs(signal)))
    convert = click & (rng.random(10_000) < np.where(signal > 0, 0.8, 0.1))
    time = np.arange(10_000)
    labels = {"click": click.astype(np.float32), "convert": convert.astype(np.float32)}
    return {"user": time % 2, "cut.view": 0 * time, "timestamp": time, "signal": signal, "noise": noise, **labels}


def write(folder, rows, schema=SCHEMA):
    with Writer(folder, schema) as writer:
        writer.write_events(
            {"view": (np.zeros(2, int), {"timestamp": np.zeros(0, int), "item": np.zeros(0, int)})}, [0, 1]
        )
        writer.write_samples(rows)
    return folder


def test_trees_find_the_signal_and_popularity_does_not(tmp_path, rows):
    scores = baselines.compute(write(tmp_path, rows), SCHEMA, eval_splits=("validation", "test"))
    assert list(scores) == ["popularity", "trees"] and list(scores["trees"]) == ["validation", "test"]
    trees, popular = scores["trees"]["test"], scores["popularity"]["test"]
    assert trees["click"]["ne"] < 0.85 and trees["convert"]["ne"] < 0.75
    assert popular["click"]["ne"] == pytest.approx(1.0, abs=0.01)
    assert trees["click"]["rows"] == 3_000 and scores["trees"]["validation"]["click"]["rows"] == 1_000
    assert trees["convert"]["rows"] == rows["click"][7_000:].sum()
    assert trees["click"]["base_rate"] == pytest.approx(rows["click"][:6_000].mean())
    clicked = rows["click"][:6_000] == 1
    assert trees["convert"]["base_rate"] == pytest.approx(rows["convert"][:6_000][clicked].mean())


def test_a_capped_fit_keeps_the_base_rate_and_repeats(tmp_path, rows):
    write(tmp_path, rows)
    one, same, other = (baselines.compute(tmp_path, SCHEMA, max_train_rows=1_000, seed=s) for s in (1, 1, 2))
    assert one == same != other
    assert one["trees"]["test"]["click"]["base_rate"] == pytest.approx(rows["click"][:6_000].mean())


def test_test_rows_do_not_change_the_fit(tmp_path, rows):
    """Other labels after the train split: the predictions, and so their mean, stay."""
    means = []
    for name, flip in (("a", False), ("b", True)):
        changed = {**rows, "click": rows["click"].copy()}
        changed["click"][6_000:] = 1 - changed["click"][6_000:] if flip else changed["click"][6_000:]
        figures = baselines.compute(write(tmp_path / name, changed), SCHEMA)["trees"]["test"]["click"]
        means.append(figures["calibration"] * figures["label_rate"])
    assert means[0] == pytest.approx(means[1])


def test_weights_and_fractional_labels_count_as_in_the_loss(tmp_path, rows):
    """A label of 1/2 fits as half a positive and half a negative; a row of weight 0 does not count."""
    halves = {**rows, "click": np.full(10_000, 0.5, np.float32), "weight": np.ones(10_000, np.float32)}
    halves["click"][:3_000], halves["weight"][:3_000] = 1, 0
    schema = replace(SCHEMA, labels=(Label("click"),), baselines=(POPULARITY,))
    del halves["convert"]
    figures = baselines.compute(write(tmp_path, halves, schema), schema)["popularity"]["test"]["click"]
    assert figures["base_rate"] == pytest.approx(0.5) and figures["calibration"] == pytest.approx(1.0, abs=1e-3)
    assert figures["ne"] == pytest.approx(1.0, abs=1e-3)


def test_one_class_in_training_gives_its_constant(tmp_path, rows):
    """NE is undefined there (no entropy), which is reported as None and not as 0 or infinity."""
    rows["click"][:6_000] = rows["convert"][:6_000] = 0
    scores = baselines.compute(write(tmp_path, rows), SCHEMA)["trees"]["test"]
    assert scores["click"]["ne"] is None and scores["click"]["auc"] == pytest.approx(0.5)
    assert scores["convert"]["base_rate"] is None and scores["convert"]["rows"] > 0


def test_missing_scikit_learn_is_said(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert baselines.compute(write(tmp_path, rows), SCHEMA) == {}
    assert "pip install 'opengem[data]'" in capsys.readouterr().out


def test_schema_without_baselines_and_unknown_split(tmp_path, rows):
    write(tmp_path, rows)
    assert baselines.compute(tmp_path, replace(SCHEMA, baselines=())) == {}
    with pytest.raises(UserError, match="split 'tset'"):
        baselines.compute(tmp_path, SCHEMA, eval_splits=("tset",))
