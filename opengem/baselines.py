"""The cheap models every run is compared with, fitted on the rows it trains on and scored on the rows it is scored on.

`schema.baselines` names them: a logistic regression (popularity) or gradient-boosted trees (hand-made counts) on dense
features of the samples. They need scikit-learn, an optional dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from opengem.data.labels import base_rates
from opengem.data.schema import Label, Schema
from opengem.data.store import Samples
from opengem.metrics import summarize

TREES = {"max_iter": 200, "max_leaf_nodes": 31, "min_samples_leaf": 100}
Scores = dict[str, float | int | None]


def compute(
    folder: Path | str, schema: Schema, *, train_split: str = "train", eval_splits: Sequence[str] = ("test",),
    max_train_rows: int = 2_000_000, seed: int = 0, rates: dict[str, float | None] | None = None
) -> dict[str, dict[str, dict[str, Scores]]]:
    """baseline -> split -> label -> the figures of `metrics.summarize`, each split scored on all of its rows.

    max_train_rows: a larger training split is sampled evenly, without replacement. A conditional label is fitted and
    scored where its condition is 1. rates: base rates of the whole training split, for NE (default: read here). Without
    scikit-learn: prints how to get it and returns {}. A schema without baselines: {}. Unknown or empty splits raise
    UserError.
    """
    if not schema.baselines:
        return {}
    if find_spec("sklearn") is None:
        print("baselines are left out: scikit-learn is not installed; run `pip install 'opengem[data]'`")
        return {}
    inputs = list(dict.fromkeys(name for baseline in schema.baselines for name in baseline.features))
    columns = [*inputs, "weight", *(label.name for label in schema.labels)]
    samples = Samples.open(folder, schema, columns=columns)
    train = _sampled(samples, train_split, max_train_rows, seed)
    rates = rates or base_rates(folder, schema, train_split)
    scores = {baseline.name: {split: {} for split in eval_splits} for baseline in schema.baselines}
    models = {
        (baseline.name, label.name): _fit(baseline.kind, baseline.features, train, label, seed)
        for baseline in schema.baselines
        for label in schema.labels
    }
    for split in eval_splits:
        rows = samples.read(*samples.split(split))
        for baseline in schema.baselines:
            for label in schema.labels:
                counted = label.counts(rows)
                predictions = models[baseline.name, label.name](_matrix(rows, baseline.features)[counted])
                scores[baseline.name][split][label.name] = summarize(
                    predictions, rows[label.name][counted], rows["weight"][counted], rates[label.name]
                )
    return scores


def _sampled(samples: Samples, split: str, max_rows: int, seed: int) -> dict[str, np.ndarray]:
    first, last = samples.split(split)
    if last - first <= max_rows:
        return samples.read(first, last)
    chosen = np.random.default_rng(seed).choice(last - first, max_rows, replace=False)
    return samples.take(first + np.sort(chosen))


def _matrix(rows: dict[str, np.ndarray], features: Sequence[str]) -> np.ndarray:
    return np.stack([rows[name] for name in features], axis=1)


def _fit(kind: str, features: Sequence[str], rows: dict[str, np.ndarray], label: Label, seed: int):
    """A function from inputs `[N, F]` to probabilities `[N]`.

    A label y in [0, 1] counts as a positive of weight y and a negative of weight 1 - y, as in the model's loss.
    """
    counted = label.counts(rows)
    inputs, target, weight = _matrix(rows, features)[counted], rows[label.name][counted], rows["weight"][counted]
    inputs, classes = np.concatenate([inputs, inputs]), np.repeat([1, 0], len(target))
    weight = np.concatenate([weight * target, weight * (1 - target)])
    kept = weight > 0
    inputs, classes, weight = inputs[kept], classes[kept], weight[kept]
    if len(np.unique(classes)) < 2:
        constant = float(classes.mean()) if len(classes) else 0.5
        return lambda x: np.full(len(x), constant)
    model = _model(kind, seed).fit(inputs, classes, sample_weight=weight)
    return lambda x: model.predict_proba(x)[:, 1] if len(x) else np.zeros(0)


def _model(kind: str, seed: int):
    if kind == "logistic":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression()
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(**TREES, early_stopping=False, random_state=seed)
