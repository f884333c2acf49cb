"""Where labels count, and their base rates."""

from __future__ import annotations

import numpy as np
import pytest

from opengem.data.labels import base_rates
from opengem.data.schema import Label, Schema
from opengem.data.store import Samples
from tests import small


def test_unknown_and_unconditioned_rows_do_not_count():
    labels = {"click": np.array([1, 1, 0, np.nan]), "convert": np.array([1, np.nan, 0, 0])}
    assert Label("click").counts(labels).tolist() == [True, True, True, False]
    assert Label("convert", given="click").counts(labels).tolist() == [True, False, False, False]


def test_base_rates_are_weighted_means_of_one_split(tmp_path, monkeypatch):
    data = small.write(tmp_path / "data")
    schema = Schema.load(data)
    samples = Samples.open(data, schema)
    columns = samples.read(*samples.split("train"))
    monkeypatch.setattr("opengem.data.labels.ROWS_AT_ONCE", 100)
    rates = base_rates(data, schema, "train")
    assert rates["click"] == pytest.approx(columns["click"].mean())
    assert rates["convert"] == pytest.approx(columns["convert"][columns["click"] == 1].mean())
