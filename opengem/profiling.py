"""`opengem profile`: a job and a batch for `efficiency/profile.py`, and what it found as JSON and HTML."""

from __future__ import annotations

import html
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from opengem.config import Config
from opengem.data.batch import Batch
from opengem.data.files import writable
from opengem.data.schema import Schema
from opengem.efficiency import profile, profile_page, workload
from opengem.efficiency.page import document
from opengem.errors import UserError
from opengem.job import Job, build, pick_device
from opengem.runlog import environment, write_whole

PROBE = 32


def run(config: Config, data: Path | None, samples: int = 0, streams: int = 3, lengths: str = "") -> dict:
    """Profile a training step of `config` on a batch of `data`, or on a random one of `streams` streams.

    samples: of the step; 0 takes the recipe's batch, on a GPU as much of it as fits. lengths: law of the random
    histories. UserError for wrong input.
    """
    if samples < 0 or streams < 0:
        raise UserError(f"profile: --samples and --streams must be at least 0, got {samples} and {streams}")
    schema = Schema.load(data) if data else workload.schema(config, streams)
    with pick_device(config)[0]:  # parameters drawn where they are used: seconds for billions of them
        job = build(config, schema)
    make = partial(_batch, job, data, lengths)
    if samples or job.device.type == "cpu":
        batch = make(samples or config.data.batch_size)
    else:
        batch = profile.largest_batch(job, make, PROBE, config.data.batch_size)
    result = profile.measure(job, batch, batch_ms=_loader_ms(job, data) if data else 0.0)
    return {"recipe": config.name, "data": job.schema.name} | result | {"environment": environment(job.device)}


def _batch(job: Job, data: Path | None, lengths: str, samples: int) -> Batch:
    if data is None:
        return workload.batch(job.schema, job.max_lengths, samples, lengths).to(job.device)
    job.config = replace(job.config, data=replace(job.config.data, batch_size=samples))
    return next(iter(job.loader(data, job.config.data.train_split, training=True))).to(job.device)


def _loader_ms(job: Job, data: Path, batches: int = 6) -> float:
    """Milliseconds the loader takes for a batch, by itself; the first ones, which fill its queue, left out."""
    marks = []
    for _ in islice(job.loader(data, job.config.data.train_split, training=True), batches):
        marks.append(time.perf_counter())
    times = [1e3 * (end - start) for start, end in zip(marks, marks[1:], strict=False)][2:]
    return statistics.median(times) if times else 0.0


def write(result: dict, out: Path) -> Path:
    """profile.json and profile.html in the folder `out`; returns the page."""
    title = f"{result['recipe']}: profile of a training step"
    page = document(title, [f"<h1>{html.escape(title)}</h1>", profile_page.section(result)])
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "profile.json", json.dumps(result) + "\n")
        write_whole(out / "profile.html", page)
    return out / "profile.html"
