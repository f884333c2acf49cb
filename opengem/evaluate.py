"""Score a split: metrics per task, predictions per row, and the progressive (predict, then train) pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from opengem import mesh
from opengem.data.batch import Batch
from opengem.data.files import writable
from opengem.errors import NonFiniteError, UserError
from opengem.job import Job, Step
from opengem.metrics import calibration_curve, summarize


def score(job: Job, batches: Iterable[Batch]) -> Iterator[tuple[Batch, dict[str, torch.Tensor]]]:
    """(batch on the host, label -> probabilities `[B]` float32 on the host) for each batch, without learning."""
    job.model.eval()
    with torch.no_grad():
        for batch in batches:
            logits = job.forward(batch.to(job.device, non_blocking=True))
            yield batch, {name: value.float().sigmoid().cpu() for name, value in logits.items()}


def score_progressively(job: Job, batches: Iterable[Batch]) -> Iterator[tuple[Batch, dict[str, torch.Tensor]]]:
    """As `score`, but each batch is learned from after it was predicted (online training on the split)."""
    job.model.train()
    step = None
    for batch in batches:
        on_device = batch.to(job.device, non_blocking=True)
        logits = job.forward(on_device)
        probabilities = {name: value.detach().float().sigmoid().cpu() for name, value in logits.items()}
        _check(step)  # of the step before: it is done, since its successor's logits are here
        step = job.learn(job.loss(logits, on_device))
        yield batch, probabilities
    _check(step)


def _check(step: Step | None) -> None:
    if step is not None and not step.finite():
        raise NonFiniteError(f"progressive evaluation: non-finite loss or gradient in step {step.number}")


def evaluate_split(
    job: Job, folder: Path, split: str, rates: dict[str, float | None], progressive: bool = False
) -> dict[str, dict]:
    """label -> metrics of `split` (`metrics.summarize`, plus `calibration_curve`); {} on all processes but the first.

    A conditional label is scored on the rows where its condition is 1, with its conditional probability.
    """
    loader = job.loader(folder, split, training=progressive)
    scored = (score_progressively if progressive else score)(job, loader)
    kept = [  # not the histories: they are large
        {"row": batch.rows, "weight": batch.weights}
        | {f"label {name}": values for name, values in batch.labels.items()}
        | {f"chance {name}": values for name, values in chances.items()}
        for batch, chances in scored
    ]
    parts = mesh.gather_to_first({name: torch.cat([part[name] for part in kept]).numpy() for name in kept[0]})
    if parts is None:
        return {}
    order = np.argsort(np.concatenate([part["row"] for part in parts]), kind="stable")
    columns = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    labels = {label.name: columns[f"label {label.name}"] for label in job.schema.labels}
    results = {}
    for label in job.schema.labels:
        predictions, counted = columns[f"chance {label.name}"], label.counts(labels)
        scored_rows = (predictions[counted], labels[label.name][counted], columns["weight"][counted])
        results[label.name] = summarize(*scored_rows, rates[label.name])
        results[label.name]["calibration_curve"] = calibration_curve(*scored_rows)
    return results


def predict(job: Job, folder: Path, split: str, out: Path) -> int:
    """Write `row`, `timestamp` and one probability column per label to Parquet, row order kept; returns the row count.

    `split` "all" scores every sample. The file appears under its name only when it is whole.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if split == "all":
        job = replace(job, schema=replace(job.schema, splits={"all": (-(2**63), 2**63 - 1)}))
    names = [label.name for label in job.schema.labels]
    fields = [pa.field("row", pa.int64()), pa.field("timestamp", pa.int64())]
    schema = pa.schema(fields + [pa.field(name, pa.float32()) for name in names])
    loader = job.loader(folder, split, training=False)
    if out.exists() and not out.is_file():
        raise UserError(f"{out} is no file that could be replaced; choose another --out")
    building = out.with_name(f".{out.name}.building")
    with writable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with pq.ParquetWriter(building, schema) as writer:
                for batch, chances in score(job, loader):
                    columns = [batch.rows.numpy(), batch.timestamps.numpy(), *(chances[name].numpy() for name in names)]
                    writer.write_table(pa.table([pa.array(c) for c in columns], schema=schema))
            building.rename(out)
        finally:
            building.unlink(missing_ok=True)
    return loader.num_rows
