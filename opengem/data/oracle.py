"""Scores of a predictor whose probabilities are known: entropy, expected log loss, AUC, and what a missing term costs.

Everything is in nats and float64. A `Term` is one standardised part of a logit; leaving it out means predicting
E[p | the other terms], the best any model can do that does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NODES = 64
"""points an empirical law is integrated over"""


@dataclass(frozen=True)
class Term:
    """One part of a logit, for `N` samples.

    value: float64 `[N]`, mean 0 and variance 1. scale: the standard deviation it was divided by.
    coins: int64 `[N]` when the value is, given everything else, a sum of that many fair coins of +-1 / scale;
        None when its law is the same for every sample (then the law is that of `value` itself).
    """

    value: np.ndarray
    scale: float
    coins: np.ndarray | None = None

    def laws(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Groups of `rows` (positions in it, values `[J]`, probabilities `[J]`) that share one law."""
        if self.coins is None:
            nodes = np.quantile(self.value, (np.arange(NODES) + 0.5) / NODES)
            yield np.arange(len(rows)), nodes, np.full(NODES, 1 / NODES)
            return
        coins = self.coins[rows]
        for count in np.unique(coins):
            heads = np.arange(count + 1)
            weights = np.array([math.comb(count, h) / 2**count for h in heads.tolist()])
            yield np.flatnonzero(coins == count), (2 * heads - count) / self.scale, weights


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def entropy(p: np.ndarray | float) -> np.ndarray | float:
    """H(p) = -(p ln p + (1 - p) ln(1 - p)) in nats, 0 at 0 and 1."""
    return cross_entropy(p, p)


def cross_entropy(p: np.ndarray | float, q: np.ndarray | float) -> np.ndarray | float:
    """Log loss of the prediction `q`: expected when `p` is a probability, observed when `p` is a label."""
    tiny = np.finfo(np.float64).tiny
    q = np.asarray(q, np.float64)
    return -(p * np.log(np.maximum(q, tiny)) + (1 - p) * np.log(np.maximum(1 - q, tiny)))


def normalised_entropy(p: np.ndarray, q: np.ndarray | None = None, weight: np.ndarray | None = None) -> float:
    """Expected NE of predicting `q` (default the truth `p`): mean log loss / H(mean p) (He et al., ADKDD 2014)."""
    loss = cross_entropy(p, p if q is None else q)
    return float(np.average(loss, weights=weight) / entropy(np.average(p, weights=weight)))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half; nan when one class is missing."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    negatives = len(labels) - positives
    if not positives or not negatives:
        return math.nan
    return float(((ranks * labels).sum() - positives * (positives + 1) / 2) / (positives * negatives))


def intercept(score: np.ndarray, rate: float, weight: np.ndarray | None = None) -> float:
    """The b for which the (weighted) mean of sigmoid(b + score) is `rate`, by bisection."""
    low, high = -60.0 - float(np.max(score)), 60.0 - float(np.min(score))
    for _ in range(80):
        middle = (low + high) / 2
        above = np.average(sigmoid(middle + score), weights=weight) > rate
        low, high = (low, middle) if above else (middle, high)
    return (low + high) / 2


def without(
    term: Term, logit: np.ndarray, weight: float, rows: np.ndarray, given: tuple[np.ndarray, float] | None = None,
) -> np.ndarray:
    """E[p | the other terms] for the samples `rows`, where p = sigmoid(logit) and `term` enters with `weight`.

    given: (logit, weight of the same term) of the event the label is conditional on. The law of the term among samples
        where that event happened is tilted by its probability.
    """
    result = np.empty(len(rows))
    rest = logit[rows] - weight * term.value[rows]
    rest_given = None if given is None else given[0][rows] - given[1] * term.value[rows]
    for group, nodes, chances in term.laws(rows):
        total, mass = np.zeros(len(group)), np.zeros(len(group))
        for node, chance in zip(nodes, chances, strict=True):
            seen = chance if given is None else chance * sigmoid(rest_given[group] + given[1] * node)
            total += seen * sigmoid(rest[group] + weight * node)
            mass += seen
        result[group] = total / mass
    return result
