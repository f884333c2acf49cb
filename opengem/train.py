"""The training loop: batch, embed, model, loss, backward, check, step, save, report; on one process or on several.

One pass over time-ordered data with progressive validation: the logged NE of a batch comes from logits computed before
the step that learns from it. Read `job.py` for what a step does and `checkpoint.py` for what survives a kill.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from opengem import baselines, checkpoint, mesh
from opengem.config import Config, to_json
from opengem.data.batch import Batch
from opengem.data.labels import base_rates
from opengem.data.loader import Loader
from opengem.data.schema import Schema
from opengem.efficiency import hardware, memory, mfu
from opengem.efficiency.flops import RunFlops
from opengem.errors import NonFiniteError, UserError
from opengem.evaluate import evaluate_split
from opengem.job import Job, Step, build, pick_device, run_config
from opengem.loss import Meter
from opengem.metrics import entropy
from opengem.runlog import NoLog, RunLog, environment, peak_memory_bytes
from opengem.sparse.collection import Distributed
from opengem.sparse.pipeline import Pipeline


def train(config: Config, data: Path, out: Path, resume: str = "auto", with_baselines: bool = True) -> dict:
    """Train `config` on the data folder, write the run folder `out`, return its summary.

    resume: "auto" continues from the newest complete checkpoint of `out` if there is one; "never" starts over and
    refuses an `out` that holds a run; otherwise the path of a checkpoint to start from. with_baselines: fit the data
    set's baselines on the same splits, so that the summary compares like with like.
    Under torchrun all its processes train together: each reads its part of every batch, the first one writes the run
    folder and returns the summary, the others return {}.
    Raises UserError (wrong input) and NonFiniteError (nothing was stepped or saved since the last checkpoint).
    """
    with mesh.joined(pick_device(config)[0].type):
        return _train(config, Path(data), Path(out), resume, with_baselines)


def _train(config: Config, data: Path, out: Path, resume: str, with_baselines: bool) -> dict:
    schema = Schema.load(data)
    job = build(config, schema)
    loader = job.loader(data, config.data.train_split, training=True)
    for name in config.data.eval_splits:
        job.loader(data, name, training=False)  # a split that is missing or empty is told before the pass, not after it
    steps = len(loader) * config.train.epochs
    job.total_steps = min(config.train.steps or steps, steps)
    rates = base_rates(data, schema, config.data.train_split)
    first = mesh.rank() == 0
    progress = Progress.of(job)
    peak = hardware.bf16_peak(hardware.device_name(job.device))
    peak = peak and peak * mesh.world_size()
    source = _find_checkpoint(config, out, resume)
    if source is not None:
        progress.load(job.restore(source), job, loader)
        if first:
            print(f"resumed from {source} at step {job.step} of {job.total_steps}")
    describe(job)
    mesh.barrier()  # all have read the run folder before the first process writes it

    options = (job.step, job.total_steps, config.train.progress, peak)
    with RunLog(out, to_json(config), *options) if first else NoLog() as log:
        job.model.train()
        unread: list[tuple[Step, Tensor]] = []
        feed = Feed(job, loader, progress)
        for batch, ids in feed:
            logits = job.forward(batch, ids)
            feed.ahead()
            progress.add(logits, batch)
            step = job.learn(job.loss(logits, batch))
            last = job.step == job.total_steps
            logs = last or job.step % config.train.log_every == 0
            saves = last or (config.train.save_every and job.step % config.train.save_every == 0)
            unread = _read([*unread, (step, batch.rows)], 0 if logs or saves else 1, out)
            if logs:
                job.embeddings.check()
                log.write(progress.line(job, step, batch, rates))
            if saves:
                state = job.state(progress.dump(job))
                checkpoint.save(out / "checkpoints", job.step, state, config.train.keep_checkpoints)
        summary = {"recipe": config.name, "data": schema.name, "steps": job.step, "base_rates": rates}
        summary["splits"] = {name: evaluate_split(job, data, name, rates) for name in config.data.eval_splits}
        summary |= {"parameters": job.model.num_parameters(), "table_bytes": table_bytes(job)}
        counts = progress.counts()
        if not first:
            return {}
        summary["baselines"] = _baselines(config, data, schema, rates) if with_baselines else {}
        summary["lengths"] = counts["lengths"]
        summary |= log.throughput() | {"processes": mesh.world_size(), "environment": environment(job.device)}
        summary |= _efficiency(progress, counts, summary)
        log.finish(summary)
    return summary


@dataclass
class Progress:
    """What this process has seen; `counts`, `line` and `dump` add up all processes (collective).

    window, total: sums of the tasks since the last logged line and before it. lengths: stream -> int64
    `[longest + 1]`, samples by history length.
    """

    window: Meter
    total: Meter
    lengths: dict[str, Tensor]
    flops: RunFlops
    epoch: int = 0
    samples: int = 0
    padded_tokens: int = 0
    position: dict = field(default_factory=dict)  # of the loader behind the newest batch that was taken

    @classmethod
    def of(cls, job: Job) -> Progress:
        lengths = {name: torch.zeros(longest + 1, dtype=torch.int64) for name, longest in job.max_lengths.items()}
        flops = RunFlops(job.model.flops, [stream.name for stream in job.schema.streams])
        return cls(Meter(job.schema.labels, job.device), Meter(job.schema.labels, job.device), lengths, flops)

    def add(self, logits: dict[str, Tensor], batch: Batch) -> None:
        self.window.add(logits, batch)

    def count(self, batch: Batch) -> None:
        """Samples and history tokens of a batch that is still on the host."""
        self.samples += batch.batch_size
        for name, seen in self.lengths.items():
            lengths = batch.sequences[f"{name}.timestamp"].lengths
            if batch.batch_size:
                self.padded_tokens += batch.batch_size * int(lengths.max())
                seen += torch.bincount(lengths, minlength=seen.shape[0])

    def counts(self) -> dict:
        """samples, tokens, padded_tokens, and lengths without the zeros behind the longest history."""
        own = torch.cat([torch.tensor([self.samples, self.padded_tokens]), *self.lengths.values()])
        sums = mesh.sum_over_ranks(own.to(self.window.sums.device)).tolist()
        samples, padded_tokens, at = sums[0], sums[1], 2
        tokens, lengths = 0, {}
        for name, seen in self.lengths.items():
            found = sums[at : at + seen.shape[0]]
            at += seen.shape[0]
            tokens += sum(length * count for length, count in enumerate(found))
            longest = max((length for length, count in enumerate(found) if count), default=-1)
            lengths[f"{name}.timestamp"] = found[: longest + 1]
        return {"samples": samples, "tokens": tokens, "padded_tokens": padded_tokens, "lengths": lengths}

    def line(self, job: Job, step: Step, batch: Batch, rates: dict[str, float | None]) -> dict:
        """One line of metrics.jsonl: `tasks` since the last line, `tasks_total` since the start of the run."""
        counts = self.counts()
        line = {"step": job.step, "epoch": self.epoch, "samples": counts["samples"], "tokens": counts["tokens"]}
        newest = mesh.max_over_ranks(batch.timestamps.max() if batch.batch_size else batch.timestamps.new_tensor(-1))
        line |= {"timestamp": int(newest), "loss": float(step.loss), "grad_norm": float(step.norm)}
        line |= {"lr": job.optimizer.param_groups[0]["lr"], "useful_tflop": self.useful_flops(counts) / 1e12}
        line["memory"] = memory.categories(job, peak_memory_bytes())
        line["padding_avoided"] = 1 - counts["tokens"] / counts["padded_tokens"] if counts["padded_tokens"] else 0.0
        self.total.sums += self.window.sums
        line |= {"tasks": _tasks(self.window, rates), "tasks_total": _tasks(self.total, rates)}
        self.window.reset()
        return line

    def useful_flops(self, counts: dict) -> int:
        """Useful FLOPs of the run so far, on all processes."""
        histories = {name.removesuffix(".timestamp"): found for name, found in counts["lengths"].items()}
        return self.flops.training(histories, counts["samples"])

    def dump(self, job: Job) -> str:
        """What `load` needs to go on bit for bit, as JSON."""
        meters = {name: list(getattr(self, name).read().values()) for name in ("window", "total")}
        counts = {"epoch": self.epoch, **self.counts()}
        return json.dumps({"step": job.step, "loader": self.position, "counts": counts, "meters": meters})

    def load(self, text: str, job: Job, loader: Loader) -> None:
        """The first process takes over the sums of all; the others start at 0."""
        saved = json.loads(text)
        job.step, self.epoch = saved["step"], saved["counts"]["epoch"]
        self.position = saved["loader"]
        loader.load_state_dict(self.position)
        first = mesh.rank() == 0
        for name, seen in self.lengths.items():
            found = saved["counts"]["lengths"][f"{name}.timestamp"]
            more = torch.zeros(max(0, len(found) - seen.shape[0]), dtype=torch.int64)  # the run kept longer histories
            self.lengths[name] = seen = torch.cat([seen, more])
            if first:
                seen[: len(found)] = torch.tensor(found, dtype=torch.int64)
        if first:
            self.samples, self.padded_tokens = saved["counts"]["samples"], saved["counts"]["padded_tokens"]
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


class Feed:
    """Batches on the device, with their ids where these are distributed ahead, until `total_steps`.

    Between passes the tables start anew, since a second pass over the same rows overfits them (Zhang et al., "Towards
    Understanding the Overfitting Phenomenon of Deep CTR", 2022).
    """

    def __init__(self, job: Job, loader: Loader, progress: Progress) -> None:
        self.job, self.loader, self.progress = job, loader, progress
        self.read: deque[tuple[Batch, dict]] = deque()  # on the host, and where the loader stood
        self.pipeline: Pipeline | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Distributed | None]]:
        job, progress = self.job, self.progress
        while job.step < job.total_steps:
            for batch, ids in self._pass():
                host, progress.position = self.read.popleft()
                progress.count(host)
                yield batch, ids
            if job.step < job.total_steps:
                progress.epoch += 1
                job.embeddings.reinitialise(job.config.train.seed + progress.epoch)

    def ahead(self) -> None:
        """Called when the dense work of a batch is queued: the next ones get ready beside it."""
        if self.pipeline is not None:
            self.pipeline.ahead()

    def _pass(self) -> Iterable[tuple[Batch, Distributed | None]]:
        if not self.job.config.train.pipeline:
            return ((batch.to(self.job.device, non_blocking=True), None) for batch in self._host())
        self.pipeline = Pipeline(self._host(), self.job.embeddings, even=True)
        return self.pipeline

    def _host(self) -> Iterator[Batch]:
        """The rest of this pass, as far as it is wanted."""
        for batch in islice(self.loader, self.job.total_steps - self.job.step):
            self.read.append((batch, self.loader.state_dict()))
            yield batch


def describe(job: Job) -> None:
    """Print what is about to be trained: sizes, and FLOPs of a sample at full history length; collective."""
    size, processes = table_bytes(job), mesh.world_size()
    if mesh.rank() != 0:
        return
    lengths = {name: [size] for name, size in job.max_lengths.items()}
    flops = sum(job.model.flops(lengths).values())
    print(
        f"{job.config.name} on {job.schema.name}: {job.model.num_parameters():,} dense parameters, "
        f"{size / 2**20:,.1f} MiB of tables, {flops / 1e9:.4f} GFLOP forward for a sample with "
        f"full histories, {job.total_steps:,} steps of {job.config.data.batch_size} samples on "
        f"{processes} x {job.device.type}"
    )
    if job.config.model.tower_dim and job.model.towers is None:
        print("no in-batch softmax: it needs id features of role item, and of role user or context")
    if job.embeddings.plan is not None:
        print(f"tables over the ranks of a shard group, {job.config.mesh.resolve(processes).sparse_replica} copies")
        print(job.embeddings.plan.describe())


def table_bytes(job: Job) -> int:
    """Persistent bytes of rows and their state over all processes; collective."""
    return int(mesh.sum_over_ranks(torch.tensor(job.embeddings.num_bytes(), device=job.device)))


def _find_checkpoint(config: Config, out: Path, resume: str) -> Path | None:
    """The checkpoint to start from. Refuses to mix runs of different configs in one folder, another mesh aside."""
    written = out / "config.json"
    if written.is_file() and resume == "never":
        raise UserError(f"{out} already holds a run and --resume is never; choose another --out or remove the folder")
    if written.is_file() and replace(run_config(out), mesh=config.mesh) != config:
        raise UserError(f"{out} holds a run with another config; choose another --out, or pass {written} as the recipe")
    return checkpoint.find(out / "checkpoints") if resume in ("auto", "never") else Path(resume)


def _efficiency(progress: Progress, counts: dict, summary: dict) -> dict:
    """Useful FLOPs of a sample and what the steady speed makes of them on the devices of the job."""
    each = progress.useful_flops(counts) / counts["samples"] if counts["samples"] else 0.0
    device, devices = summary["environment"]["device"], summary["processes"]
    return {"flops_per_sample": each} | mfu.rates(each, summary["samples_per_s"], device, devices)


def _baselines(config: Config, data: Path, schema: Schema, rates: dict[str, float | None]) -> dict:
    splits = {"train_split": config.data.train_split, "eval_splits": config.data.eval_splits}
    return baselines.compute(data, schema, **splits, seed=config.train.seed, rates=rates)


def _read(steps: list[tuple[Step, Tensor]], keep: int, out: Path) -> list[tuple[Step, Tensor]]:
    """The newest `keep` of the (step, rows it learned from); NonFiniteError if one before them was not finite.

    Reading the newest step as well would wait until the device has done it, and leave it without work for the next.
    """
    for step, rows in steps[: len(steps) - keep]:
        if not step.finite():
            raise NonFiniteError(_explain(step, rows, out))
    return steps[len(steps) - keep :]


def _explain(step: Step, rows: Tensor, out: Path) -> str:
    where = f"rows {int(rows.min())} to {int(rows.max())}" if rows.numel() else "no rows on this rank"
    return (
        f"step {step.number}, {where}: loss {step.loss.item()}, dense gradient norm {step.norm.item()}; no step was "
        f"taken, the last complete checkpoint in {out}/checkpoints is intact. Lower --optim.lr or --sparse.lr, or look "
        "at the rows"
    )
