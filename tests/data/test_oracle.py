import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from opengem.data.oracle import Term, auc, cross_entropy, entropy, intercept, normalised_entropy, sigmoid, without

# NE and AUC of the true probability when the logit is N(mu, s^2), by base rate and s (Gauss quadrature)
TABLE = {
    (0.005, 0.5): (0.980, 0.638), (0.005, 1.5): (0.831, 0.852), (0.005, 3.0): (0.531, 0.971),
    (0.02, 1.0): (0.904, 0.757), (0.02, 1.5): (0.803, 0.846), (0.02, 2.0): (0.696, 0.904),
    (0.05, 0.5): (0.971, 0.637), (0.05, 1.0): (0.891, 0.754), (0.05, 1.5): (0.786, 0.838),
    (0.05, 2.0): (0.682, 0.893), (0.05, 3.0): (0.516, 0.949), (0.2, 0.5): (0.962, 0.636),
    (0.2, 1.0): (0.872, 0.745), (0.2, 1.5): (0.766, 0.821), (0.5, 1.0): (0.865, 0.740), (0.5, 3.0): (0.520, 0.919),
}  # fmt: skip


def normal_grid(count=40_001):
    """Midpoints of equal slices of probability of N(0, 1)."""
    from statistics import NormalDist

    return np.array([NormalDist().inv_cdf(u) for u in (np.arange(count) + 0.5) / count])


GRID = normal_grid()


@pytest.mark.parametrize(("rate", "s"), TABLE)
def test_normal_logits_give_the_known_table(rate, s):
    p = sigmoid(intercept(s * GRID, rate) + s * GRID)
    # AUC of the expected labels: share of (positive, negative) pairs in the right order
    above = np.cumsum((1 - p) / (1 - p).sum())
    expected_auc = np.sum(p / p.sum() * (above - (1 - p) / (1 - p).sum() / 2))
    ne, area = TABLE[rate, s]
    assert p.mean() == pytest.approx(rate, abs=1e-9)
    assert normalised_entropy(p) == pytest.approx(ne, abs=0.003)
    assert expected_auc == pytest.approx(area, abs=0.003)


@pytest.mark.parametrize(("rate", "s", "mu"), [(0.02, 1.5, -4.907), (0.05, 1.5, -3.846), (0.2, 1.0, -1.650)])
def test_intercepts_of_the_suggested_rates(rate, s, mu):
    assert intercept(s * GRID, rate) == pytest.approx(mu, abs=0.003)


def test_weighted_intercept():
    score, weight = np.array([-1.0, 2.0, 0.5]), np.array([1.0, 3.0, 0.0])
    b = intercept(score, 0.3, weight)
    assert np.average(sigmoid(b + score), weights=weight) == pytest.approx(0.3, abs=1e-9)


def test_entropy_at_the_ends_and_cross_entropy():
    assert entropy(np.array([0.0, 1.0])).tolist() == [0.0, 0.0]
    assert entropy(0.5) == pytest.approx(np.log(2))
    labels, q = np.array([0, 1, 1, 0]), np.array([0.1, 0.8, 0.4, 0.6])
    assert cross_entropy(labels, q).mean() == pytest.approx(log_loss(labels, q))
    assert np.isfinite(cross_entropy(1.0, 0.0))


def test_auc_counts_ties_half_and_is_undefined_with_one_class():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 500), rng.integers(0, 20, 500) / 7
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores))
    assert np.isnan(auc(np.zeros(3), np.arange(3)))


def test_a_missing_coin_term_is_averaged_exactly():
    """Against the sum over every outcome of the coins, sample by sample; no coins leaves p as it is."""
    coins, scale, a, rest = np.array([0, 1, 2, 2]), 1.3, 0.9, np.array([-1.0, 0.2, -2.0, 0.4])
    value = np.array([0, 1, -2, 0]) / scale
    q = without(Term(value, scale, coins), rest + a * value, a, np.arange(4))
    assert q[0] == pytest.approx(sigmoid(-1.0))
    assert q[1] == pytest.approx((sigmoid(0.2 + a / scale) + sigmoid(0.2 - a / scale)) / 2)
    for row in (2, 3):
        exact = np.mean([sigmoid(rest[row] + a * sum(c) / scale) for c in [(1, 1), (1, -1), (-1, 1), (-1, -1)]])
        assert q[row] == pytest.approx(exact)


def test_a_missing_term_of_known_law_against_simulation():
    """The best guess without a term has, on fresh draws of the term, the least loss: E[p | rest]."""
    rng = np.random.default_rng(1)
    f, rest = rng.normal(size=100_000), rng.normal(size=100_000) - 2
    rows = np.arange(0, 100_000, 50)
    q = without(Term(f, 1.0), rest + 0.8 * f, 0.8, rows)
    brute = sigmoid(rest[rows, None] + 0.8 * f[None, :5_000]).mean(1)
    assert np.abs(q - brute).max() < 0.01
    p = sigmoid(rest + 0.8 * f)
    q = without(Term(f, 1.0), rest + 0.8 * f, 0.8, np.arange(len(f)))
    assert np.mean(cross_entropy(p, q)) == pytest.approx(np.mean(entropy(q)), rel=0.005)


def test_a_conditional_label_tilts_the_law_by_its_condition():
    """E[p2 | rest, click] by Bayes: weights p1 over the outcomes of the coin."""
    value, coins = np.array([1.0, -1.0]), np.array([1, 1])
    z1, z2 = np.array([-1.0, 0.5]) + 0.7 * value, np.array([0.3, -0.2]) - 0.4 * value
    q = without(Term(value, 1.0, coins), z2, -0.4, np.arange(2), (z1, 0.7))
    for row, (r1, r2) in enumerate([(-1.0, 0.3), (0.5, -0.2)]):
        clicks = [sigmoid(r1 + 0.7), sigmoid(r1 - 0.7)]
        assert q[row] == pytest.approx(np.average([sigmoid(r2 - 0.4), sigmoid(r2 + 0.4)], weights=clicks))
