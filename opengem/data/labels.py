"""How often a label is 1: the constant that NE is measured against, the same for the model and its baselines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opengem.data.schema import Schema
from opengem.data.store import Samples

ROWS_AT_ONCE = 1 << 20


def base_rates(folder: Path | str, schema: Schema, split: str) -> dict[str, float | None]:
    """Weighted mean of each label over a split (None without weight): the constant that NE is measured against."""
    names = [label.name for label in schema.labels]
    samples = Samples.open(folder, schema, columns=[*names, "weight"])
    first, last = samples.split(split)
    mass, total = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for start in range(first, last, ROWS_AT_ONCE):
        columns = samples.read(start, min(start + ROWS_AT_ONCE, last))
        for label in schema.labels:
            counted = label.counts(columns)
            weight = columns["weight"][counted].astype(np.float64)
            mass[label.name] += float(weight.sum())
            total[label.name] += float((weight * columns[label.name][counted]).sum())
    return {name: total[name] / mass[name] if mass[name] > 0 else None for name in names}
