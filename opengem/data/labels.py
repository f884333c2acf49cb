"""Where a label counts, and how often it is 1: shared by evaluation and baselines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opengem.data.schema import Label, Schema
from opengem.data.store import Samples

ROWS_AT_ONCE = 1 << 20


def counts(label: Label, labels: dict[str, np.ndarray]) -> np.ndarray:
    """bool `[N]`: the rows on which `label` counts, those where it is known (not NaN) and its condition is 1."""
    known = ~np.isnan(labels[label.name])
    return known & (labels[label.given] == 1) if label.given else known


def base_rates(folder: Path | str, schema: Schema, split: str) -> dict[str, float | None]:
    """Weighted mean of each label over a split (None without weight): the constant that NE is measured against."""
    names = [label.name for label in schema.labels]
    samples = Samples.open(folder, schema, columns=[*names, "weight"])
    first, last = samples.split(split)
    mass, total = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for start in range(first, last, ROWS_AT_ONCE):
        columns = samples.read(start, min(start + ROWS_AT_ONCE, last))
        for label in schema.labels:
            counted = counts(label, columns)
            weight = columns["weight"][counted].astype(np.float64)
            mass[label.name] += float(weight.sum())
            total[label.name] += float((weight * columns[label.name][counted]).sum())
    return {name: total[name] / mass[name] if mass[name] > 0 else None for name in names}
