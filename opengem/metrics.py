"""Prediction quality: NE, AUC, log loss, calibration. Plain numpy in float64.

NE (normalised entropy; He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014) is the mean log
loss divided by the entropy of a constant prediction. OpenGEM takes the constant from the TRAINING split (its weighted
mean label), so that 1.0 means "no better than knowing the base rate when training began". An undefined figure (no
weight, one class only, a base rate of 0 or 1) is None, never 0 or infinity.
"""

from __future__ import annotations

import numpy as np

from opengem.errors import UserError

PROBABILITY_FLOOR = 1e-7  # predictions are clipped to [floor, 1 - floor] before the logarithm


def entropy(rate: float) -> float:
    """Binary entropy in nats; 0 at rates 0 and 1."""
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def log_loss(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Per-sample log loss in nats, `[N]`."""
    p = np.clip(np.asarray(predictions, np.float64), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    return -(labels * np.log(p) + (1 - labels) * np.log1p(-p))


def auc(predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Exact weighted area under the ROC curve, ties counted half; None where one class has no weight.

    Labels may be fractional: a label y counts y as positive and 1 - y as negative.
    """
    predictions = np.asarray(predictions, np.float64)
    weights = np.ones_like(predictions) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(predictions, kind="stable")
    scores, positive = predictions[order], (weights * labels)[order]
    negative = weights[order] - positive
    if positive.sum() <= 0 or negative.sum() <= 0:
        return None
    first = np.flatnonzero(np.diff(scores, prepend=-np.inf))  # where each group of equal scores begins
    positive, negative = np.add.reduceat(positive, first), np.add.reduceat(negative, first)
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))


def summarize(
    predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, base_rate: float | None
) -> dict[str, float | int | None]:
    """ne, auc, logloss, calibration (mean prediction / mean label), label_rate, base_rate, rows of `[N]` predictions.

    weights: `[N]` >= 0 or None for ones; rows of weight 0 count nowhere but must still hold legal labels.
    Raises UserError for labels outside [0, 1], predictions that are not finite, or unequal sizes.
    """
    predictions, labels = np.asarray(predictions, np.float64), np.asarray(labels, np.float64)
    weights = np.ones_like(labels) if weights is None else np.asarray(weights, np.float64)
    if not predictions.shape == labels.shape == weights.shape:
        raise UserError(
            f"metrics: predictions {predictions.shape}, labels {labels.shape}, weights {weights.shape} must agree"
        )
    if labels.size and not (np.nanmin(labels) >= 0 and np.nanmax(labels) <= 1 and np.isfinite(labels).all()):
        raise UserError(f"metrics: labels must lie in [0, 1], got {labels.min()} to {labels.max()}")
    if not np.isfinite(predictions).all():
        raise UserError(f"metrics: {int((~np.isfinite(predictions)).sum())} predictions are not finite")
    total = weights.sum()
    out: dict[str, float | int | None] = {"ne": None, "auc": None, "logloss": None, "calibration": None}
    out |= {"label_rate": None, "base_rate": base_rate, "rows": int((weights > 0).sum())}
    if total <= 0:
        return out
    loss = float((weights * log_loss(predictions, labels)).sum() / total)
    rate = float((weights * labels).sum() / total)
    reference = entropy(base_rate) if base_rate is not None else 0.0
    out |= {"logloss": loss, "label_rate": rate, "auc": auc(predictions, labels, weights)}
    out["ne"] = loss / reference if reference > 0 else None
    out["calibration"] = float((weights * predictions).sum() / total) / rate if rate > 0 else None
    return out


def calibration_curve(
    predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray, bins: int = 20
) -> list[dict[str, float]]:
    """Mean prediction and mean label in `bins` groups of equal weight, lowest predictions first; [] without weight."""
    order = np.argsort(predictions, kind="stable")
    weights, total = np.asarray(weights, np.float64)[order], float(np.sum(weights))
    if total <= 0:
        return []
    group = np.minimum((np.cumsum(weights) - weights / 2) / total * bins, bins - 1e-9).astype(np.int64)
    mass = np.bincount(group, weights, bins)
    predicted = np.bincount(group, weights * np.asarray(predictions)[order], bins)
    observed = np.bincount(group, weights * np.asarray(labels)[order], bins)
    return [
        {"predicted": float(p / m), "observed": float(o / m), "weight": float(m)}
        for m, p, o in zip(mass, predicted, observed, strict=True)
        if m > 0
    ]
