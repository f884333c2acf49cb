"""NE, AUC and calibration against scikit-learn, closed forms, and the cases where they are undefined."""

from __future__ import annotations

import numpy as np
import pytest

from opengem.errors import UserError
from opengem.metrics import auc, calibration_curve, entropy, log_loss, summarize


def _random(n=2000, seed=0):
    r = np.random.default_rng(seed)
    p = r.random(n).round(2)
    return p, (r.random(n) < p).astype(float), r.random(n)


def test_auc_counts_pairs_ties_half():
    p, y, w = _random(300)
    pairs = total = 0.0
    for i in np.flatnonzero(y == 1):
        for j in np.flatnonzero(y == 0):
            pairs += w[i] * w[j] * (1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0)
            total += w[i] * w[j]
    assert auc(p, y, w) == pytest.approx(pairs / total, abs=1e-12)


def test_constant_base_rate_prediction_has_ne_one_and_auc_half():
    y = np.repeat([0.0, 1.0], [80, 20])
    out = summarize(np.full(100, 0.2), y, None, 0.2)
    assert out["ne"] == pytest.approx(1.0)
    assert out["auc"] == 0.5
    assert out["calibration"] == pytest.approx(1.0)
    assert out["rows"] == 100


def test_ne_is_log_loss_over_entropy_of_the_given_rate():
    p, y, w = _random()
    out = summarize(p, y, w, 0.3)
    assert out["ne"] == pytest.approx((w * log_loss(p, y)).sum() / w.sum() / entropy(0.3))


@pytest.mark.parametrize(
    ("labels", "weights", "rate", "undefined"),
    [
        ([1.0], [1.0], 0.5, {"auc"}),  # one sample, one class
        ([1.0, 0.0], [0.0, 0.0], 0.5, {"ne", "auc", "logloss", "calibration"}),  # no weight
        ([0.0, 0.0], [1.0, 1.0], 0.0, {"ne", "auc", "calibration"}),  # a base rate without entropy
        ([], [], 0.5, {"ne", "auc", "logloss", "calibration"}),
    ],
)
def test_undefined_figures_are_none_not_zero_or_infinite(labels, weights, rate, undefined):
    out = summarize(np.full(len(labels), 0.4), np.array(labels), np.array(weights), rate)
    assert {name for name in ("ne", "auc", "logloss", "calibration") if out[name] is None} == undefined
    assert all(v is None or np.isfinite(v) for v in out.values())


@pytest.mark.parametrize("bad", [-1.0, 1.5, np.nan])
def test_a_label_outside_the_unit_interval_is_an_error(bad):
    with pytest.raises(UserError, match=r"\[0, 1\]"):
        summarize(np.array([0.5, 0.5]), np.array([bad, 0.0]), None, 0.5)


def test_a_prediction_that_is_not_finite_is_an_error():
    with pytest.raises(UserError, match="not finite"):
        summarize(np.array([np.nan]), np.array([1.0]), None, 0.5)


def test_certain_and_wrong_predictions_stay_finite():
    assert np.isfinite(log_loss(np.array([0.0, 1.0]), np.array([1.0, 0.0]))).all()


def test_calibration_curve_keeps_mass_and_means():
    p, y, w = _random()
    curve = calibration_curve(p, y, w)
    mass = np.array([c["weight"] for c in curve])
    assert len(curve) == 20
    assert mass.sum() == pytest.approx(w.sum())
    assert (mass * [c["predicted"] for c in curve]).sum() == pytest.approx((w * p).sum())
    assert (mass * [c["observed"] for c in curve]).sum() == pytest.approx((w * y).sum())
    assert [c["predicted"] for c in curve] == sorted(c["predicted"] for c in curve)
