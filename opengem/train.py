"""The training loop: batch, embed, model, loss, backward, check, step, save, report.

One pass over time-ordered data with progressive validation: the logged NE of a batch comes from logits computed before
the step that learns from it. Read `job.py` for what a step does and `checkpoint.py` for what survives a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from opengem import baselines, checkpoint
from opengem.config import Config, from_json, to_json
from opengem.data.batch import Batch
from opengem.data.labels import base_rates
from opengem.data.loader import Loader
from opengem.data.schema import Schema
from opengem.efficiency import hardware, memory, mfu
from opengem.efficiency.flops import RunFlops
from opengem.errors import NonFiniteError, UserError
from opengem.evaluate import evaluate_split
from opengem.job import Job, build
from opengem.loss import Meter
from opengem.metrics import entropy
from opengem.runlog import RunLog, environment, peak_memory_bytes


def train(config: Config, data: Path, out: Path, resume: str = "auto", with_baselines: bool = True) -> dict:
    """Train `config` on the data folder, write the run folder `out`, return its summary.

    resume: "auto" continues from the newest complete checkpoint of `out` if there is one; "never" starts over and
    refuses an `out` that holds a run; otherwise the path of a checkpoint to start from. with_baselines: fit the data
    set's baselines on the same splits, so that the summary compares like with like.
    Raises UserError (wrong input) and NonFiniteError (nothing was stepped or saved since the last checkpoint).
    """
    _refuse_several_processes()
    schema = Schema.load(data)
    job = build(config, schema)
    loader = job.loader(data, config.data.train_split, training=True)
    for name in config.data.eval_splits:
        job.loader(data, name, training=False)  # a split that is missing or empty is told before the pass, not after it
    steps = len(loader) * config.train.epochs
    job.total_steps = min(config.train.steps or steps, steps)
    rates = base_rates(data, schema, config.data.train_split)
    flops = RunFlops(job.model.flops, [stream.name for stream in schema.streams])
    progress = Progress(Meter(schema.labels, job.device), Meter(schema.labels, job.device), flops)
    peak = hardware.bf16_peak(hardware.device_name(job.device))
    source = _find_checkpoint(config, Path(out), resume)
    if source is not None:
        progress.load(job.restore(source), job, loader)
        print(f"resumed from {source} at step {job.step} of {job.total_steps}")
    describe(job)

    with RunLog(Path(out), to_json(config), job.step, job.total_steps, config.train.progress, peak) as log:
        job.model.train()
        for batch in _batches(job, loader, progress):
            logits = job.forward(batch)
            loss = job.loss(logits, batch)
            progress.add(logits, batch)
            finite, norm = job.learn(loss)
            if not finite:
                raise NonFiniteError(_explain(job, loss, norm, batch, out))
            last = job.step == job.total_steps
            if job.step % config.train.log_every == 0 or last:
                job.embeddings.check()
                log.write(progress.line(job, loss, norm, batch, rates))
            if last or (config.train.save_every and job.step % config.train.save_every == 0):
                state = job.state(progress.dump(job, loader))
                checkpoint.save(log.folder / "checkpoints", job.step, state, config.train.keep_checkpoints)
        summary = {"recipe": config.name, "data": schema.name, "steps": job.step, "base_rates": rates}
        summary["splits"] = {name: evaluate_split(job, data, name, rates) for name in config.data.eval_splits}
        summary["baselines"] = _baselines(config, data, schema, rates) if with_baselines else {}
        summary |= {"parameters": job.model.num_parameters(), "table_bytes": job.embeddings.num_bytes()}
        summary["lengths"] = progress.lengths
        summary |= log.throughput() | {"environment": environment(job.device)}
        summary |= _efficiency(progress, summary)
        log.finish(summary)
    return summary


@dataclass
class Progress:
    """Where the run stands: sums since the last logged line and before it, samples and tokens seen."""

    window: Meter
    total: Meter
    flops: RunFlops
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)  # stream -> number of samples by history length

    def add(self, logits: dict[str, Tensor], batch: Batch) -> None:
        self.window.add({name: value.detach() for name, value in logits.items()}, batch)

    def count(self, batch: Batch) -> None:
        """Samples and history tokens of a batch that is still on the host."""
        self.samples += batch.batch_size
        for name, history in batch.sequences.items():
            if name.endswith(".timestamp") and batch.batch_size:
                self.tokens += history.values.shape[0]
                self.padded_tokens += batch.batch_size * int(history.lengths.max())
                both = zip_longest(torch.bincount(history.lengths).tolist(), self.lengths.get(name, []), fillvalue=0)
                self.lengths[name] = [now + before for now, before in both]

    def line(self, job: Job, loss: Tensor, norm: Tensor, batch: Batch, rates: dict[str, float | None]) -> dict:
        """One line of metrics.jsonl: `tasks` since the last line, `tasks_total` since the start of the run."""
        line = {"step": job.step, "epoch": self.epoch, "samples": self.samples, "tokens": self.tokens}
        line |= {"timestamp": int(batch.timestamps.max()) if batch.batch_size else None}
        line |= {"loss": float(loss.detach()), "grad_norm": float(norm), "lr": job.optimizer.param_groups[0]["lr"]}
        line |= {"useful_tflop": self.useful_flops() / 1e12, "memory": memory.categories(job, peak_memory_bytes())}
        line["padding_avoided"] = 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0
        self.total.sums += self.window.sums
        line |= {"tasks": _tasks(self.window, rates), "tasks_total": _tasks(self.total, rates)}
        self.window.reset()
        return line

    def useful_flops(self) -> int:
        """Useful FLOPs of the run so far."""
        histories = {name.removesuffix(".timestamp"): counts for name, counts in self.lengths.items()}
        return self.flops.training(histories, self.samples)

    def dump(self, job: Job, loader: Loader) -> str:
        """What `load` needs to go on bit for bit, as JSON."""
        counts = {name: getattr(self, name) for name in ("epoch", "samples", "tokens", "padded_tokens", "lengths")}
        meters = {"window": self.window.sums.tolist(), "total": self.total.sums.tolist()}
        return json.dumps({"step": job.step, "loader": loader.state_dict(), "counts": counts, "meters": meters})

    def load(self, text: str, job: Job, loader: Loader) -> None:
        saved = json.loads(text)
        job.step = saved["step"]
        loader.load_state_dict(saved["loader"])
        for name, value in saved["counts"].items():
            setattr(self, name, value)
        for name, sums in saved["meters"].items():
            getattr(self, name).sums.copy_(torch.tensor(sums, dtype=torch.float64))


def _tasks(meter: Meter, rates: dict[str, float | None]) -> dict[str, dict]:
    """ne, logloss and calibration per task from running sums; None where undefined."""
    out = {}
    for name, (weight, loss, label, prediction) in meter.read().items():
        reference = entropy(rates[name]) if rates[name] is not None else 0.0
        mean = loss / weight if weight > 0 else None
        ne = mean / reference if mean is not None and reference > 0 else None
        out[name] = {"ne": ne, "logloss": mean, "calibration": prediction / label if label > 0 else None}
    return out


def _batches(job: Job, loader: Loader, progress: Progress) -> Iterator[Batch]:
    """Batches on the device until `total_steps`; between passes the tables start anew, since a second pass over the
    same rows overfits them (Zhang et al., "Towards Understanding the Overfitting Phenomenon of Deep CTR", 2022)."""
    while job.step < job.total_steps:
        for batch in loader:
            progress.count(batch)
            yield batch.to(job.device, non_blocking=True)
            if job.step >= job.total_steps:
                return
        progress.epoch += 1
        job.embeddings.reinitialise(job.config.train.seed + progress.epoch)


def describe(job: Job) -> None:
    """Print what is about to be trained: sizes, and FLOPs of a sample at full history length."""
    lengths = {name: [size] for name, size in job.max_lengths.items()}
    flops = sum(job.model.flops(lengths).values())
    print(
        f"{job.config.name} on {job.schema.name}: {job.model.num_parameters():,} dense parameters, "
        f"{job.embeddings.num_bytes() / 2**20:,.1f} MiB of tables, {flops / 1e9:.4f} GFLOP forward for a sample with "
        f"full histories, {job.total_steps:,} steps of {job.config.data.batch_size} samples on {job.device}"
    )


def _find_checkpoint(config: Config, out: Path, resume: str) -> Path | None:
    """The checkpoint to start from. Refuses to mix runs of different configs in one folder."""
    written = out / "config.json"
    if written.is_file() and resume == "never":
        raise UserError(f"{out} already holds a run and --resume is never; choose another --out or remove the folder")
    if written.is_file() and from_json(written.read_text(), str(written)) != config:
        raise UserError(f"{out} holds a run with another config; choose another --out, or pass {written} as the recipe")
    return checkpoint.find(out / "checkpoints") if resume in ("auto", "never") else Path(resume)


def _refuse_several_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE > 1: training on several processes is not available in this version; start one")


def _efficiency(progress: Progress, summary: dict) -> dict:
    """Useful FLOPs of a sample and what the steady speed makes of them on this device."""
    each = progress.useful_flops() / progress.samples if progress.samples else 0.0
    return {"flops_per_sample": each} | mfu.rates(each, summary["samples_per_s"], summary["environment"]["device"])


def _baselines(config: Config, data: Path, schema: Schema, rates: dict[str, float | None]) -> dict:
    splits = {"train_split": config.data.train_split, "eval_splits": config.data.eval_splits}
    return baselines.compute(data, schema, **splits, seed=config.train.seed, rates=rates)


def _explain(job: Job, loss: Tensor, norm: Tensor, batch: Batch, out: Path) -> str:
    rows = f"rows {int(batch.rows.min())} to {int(batch.rows.max())}"
    return (
        f"step {job.step + 1}, {rows}: loss {loss.item()}, dense gradient norm {norm.item()}; no step was taken, the "
        f"last complete checkpoint in {out}/checkpoints is intact. Lower --optim.lr or --sparse.lr, or look at the rows"
    )
