"""`opengem bench train`: the medium recipe on one GPU, from an honest baseline up, one technique at a time.

Every rung trains the same parameters on the same synthetic stream (log-normal histories to 4,096 events, fill about
.5) at the same batch size, which gives its NE; then it is timed and profiled at the largest batch that fits.
A rung is what the package does, with each technique that is not yet on replaced by plain PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor

from benchmarks import train_plain as plain
from benchmarks.run import ceilings, environment, record
from benchmarks.train_baseline import Baseline
from opengem.config import Config, to_json
from opengem.data import synthetic
from opengem.data.batch import Batch
from opengem.data.schema import Schema
from opengem.efficiency import profile
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.job import Job, Step, build
from opengem.kernels import backend
from opengem.loss import Meter
from opengem.metrics import entropy
from opengem.runlog import RunLog
from opengem.train import Progress
from recipes import medium, small

STREAM = dict(users=512, samples=8192, lengths="lognormal(2650)", max_length=4096, streams=3, items=1 << 20,
              base_rate=0.3, strength=3.0, mechanisms=("count", "recency", "cross", "bias", "drift"))  # fmt: skip
LIMIT = 1024


@dataclass(frozen=True)
class Rung:
    """One technique more than the rung before. article: what Meta's article says it gained there."""

    technique: str
    what: str
    article: str


LADDER = (
    Rung("baseline", "padded batches, cuDNN SDPA, bf16, torch.compile, torch look-ups", ""),
    Rung("jagged", "ragged histories, jagged flash attention", "JFA: +12 % QPS, +18.5 % Local MFU"),
    Rung("gdpa", "GDPA kernels", "GDPA and relatives: +30 %"),
    Rung("block", "block attention, rotary kernel", "block attention: +30.6 % of the layer's MFU, +44 % over SWA"),
    Rung("norm", "norms with the residual sum, one pass", "part of GDPA and relatives"),
    Rung("sparse", "table-batched look-up and fused update", ""),
)
# technique -> name in the modules of the model, and what stands in for it while the technique is off
STAND_INS = {
    "gdpa": {"gdpa": plain.gdpa, "average_and_count": plain.average_and_count},
    "block": {"block_attention": plain.block_attention, "apply_rope": plain.apply_rope},
    "norm": {name: getattr(plain, name) for name in ("layer_norm", "layer_norm_on", "modulated_norm", "chained_norms")},
}
MODULES = [importlib.import_module(f"opengem.model.{m}") for m in
           ("attention", "blocks", "gem", "heads", "interaction", "tokenizer")]


@contextlib.contextmanager
def only(techniques: tuple[str, ...]) -> Iterator[None]:
    """The package with every technique that is not among `techniques` replaced by its stand-in."""
    with contextlib.ExitStack() as stack:
        off = {k: v for t, names in STAND_INS.items() if t not in techniques for k, v in names.items()}
        for module in MODULES:
            for name in off.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, off[name]))
        if "sparse" not in techniques:
            stack.enter_context(patch.dict(backend.TABLE, {"sparse_lookup": ()}))
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))  # a compiled layer meets many shapes
        yield


def run(out: Path | None, ladder: bool, rungs: tuple[str, ...] = (), samples: int = 6144, batch: int = 32,
        config: Config | None = None, device: str = "cuda") -> list[dict]:
    """Measure the rungs (all with `ladder`, else the last), append rows to `out` as they are made, return them.

    rungs: only these. samples, batch: of the stream that gives the NE; none are needed for the speed alone.
    """
    where, config = _device(device), config or medium.recipe()
    known = [rung.technique for rung in LADDER]
    if set(rungs) - set(known):
        raise UserError(f"bench train: no rung {sorted(set(rungs) - set(known))}; known: {', '.join(known)}")
    chosen = [rung for rung in LADDER if rung.technique in rungs] or list(LADDER[0 if ladder else -1 :])
    facts = environment(where) | ceilings(where) if where.type == "cuda" else {"gpu": "cpu"}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        synthetic.build(Path(folder) / "data", **STREAM)
        for rung in chosen:
            techniques = tuple(r.technique for r in LADDER[: LADDER.index(rung) + 1])
            row = measure(config, Path(folder) / "data", techniques, samples, batch, where)
            if rung.technique == "baseline":
                torch._dynamo.reset()  # its compiled layers hold on to their parameters
            gc.collect()
            torch.cuda.empty_cache()
            row |= {"technique": rung.what, "article": rung.article} | facts
            rows.append(row)
            record(row, describe(row), out)
    return rows


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("bench train needs a CUDA device and this machine has none")
    return torch.device(name)


def measure(config: Config, data: Path, techniques: tuple[str, ...], samples: int, size: int,
            device: torch.device) -> dict:
    """One row: NE of a stream of `samples` at batch `size`, then speed at the largest batch that fits."""
    name = techniques[-1]
    row = {"op": "train", "case": f"{config.name}_ladder", "impl": name, "peer": None, "techniques": list(techniques)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with only(techniques):
        job = job_of(config, data, device, compiled=name == "baseline")
        layers_of = job.model.layers if name == "baseline" else None
        print(f"{time.strftime('%X')} {name}: built", flush=True)
        if samples:
            row |= quality(job, data, samples, size)
            print(f"{time.strftime('%X')} {name}: NE {row['ne']:.4f}", flush=True)
        sized = partial(_batch, job, data)
        batch = profile.largest_batch(job, sized, size, LIMIT) if device.type == "cuda" else sized(size)
        result = profile.measure(job, batch, warmup=1, steps=5, layers_of=layers_of, count=False)
    row |= summary(result)
    row["peak_gib"] = result["peak_bytes"] and result["peak_bytes"] / 2**30
    return row


def summary(result: dict) -> dict:
    """The columns of a row that a profile gives."""
    times = sorted(result["step_times_ms"])
    return {
        "samples_per_s": result["samples_per_s"], "tokens_per_s": result["tokens_per_s"],
        "batch": result["samples"], "tokens": result["tokens"], "step_ms": result["step_ms"],
        "spread": (times[-1] - times[0]) / result["step_ms"], "busy_ms": result["busy_ms"],
        "tflop_per_step": result["flops"] / 1e12, "useful_tflops": result["useful_tflops"],
        "local_mfu": result["local_mfu"], "e2e_mfu": result["e2e_mfu"],
    }  # fmt: skip


def job_of(config: Config, data: Path, device: torch.device, compiled: bool) -> Job:
    """The parameters are drawn on the device: the same for every rung, and in seconds."""
    train = replace(config.train, device=device.type)
    with device:
        job = build(replace(config, train=train), Schema.load(data))
    if compiled:
        job.model = Baseline(job.model, compiled=device.type == "cuda")
    return job


def _batches(job: Job, data: Path, size: int) -> Iterator[Batch]:
    job.config = replace(job.config, data=replace(job.config.data, batch_size=size))
    for batch in job.loader(data, "train", training=True):
        yield batch.to(job.device, non_blocking=True)


def _batch(job: Job, data: Path, size: int) -> Batch:
    return next(_batches(job, data, size))


def quality(job: Job, data: Path, samples: int, size: int, order: int = 0) -> dict:
    """Progressive NE of the first label: every batch is predicted, then learned from, at the recipe's rate with a
    quarter of the steps as warm-up. order: number of an order of the samples in a batch, 0: that of the data."""
    meter = Meter(job.schema.labels, job.device)
    job.total_steps = samples // size
    job.config = replace(job.config, optim=replace(job.config.optim, warmup_steps=max(1, job.total_steps // 4)))
    for batch in islice(_batches(job, data, size), job.total_steps):
        batch = reordered(batch, order) if order else batch
        logits = job.forward(batch)
        meter.add({name: value.detach() for name, value in logits.items()}, batch)
        step = job.learn(job.loss(logits, batch))
    if not step.finite():
        raise RuntimeError("non-finite loss or gradient")
    weight, loss, label, _ = meter.read()[job.schema.labels[0].name]
    return {"ne": loss / weight / entropy(label / weight), "ne_samples": samples, "ne_batch": size}


def reordered(batch: Batch, seed: int) -> Batch:
    """The same samples in another order."""
    order = torch.randperm(batch.batch_size, generator=torch.Generator().manual_seed(seed)).to(batch.rows.device)
    done: dict[int, tuple[Tensor, Tensor]] = {}  # offsets, place of each event; the attributes of a stream share them

    def one(x: Jagged | Tensor) -> Jagged | Tensor:
        if isinstance(x, Tensor):
            return x[order]
        if id(x.offsets) not in done:
            lengths = x.lengths[order]
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            start = torch.repeat_interleave(x.offsets[:-1][order] - offsets[:-1], lengths)
            done[id(x.offsets)] = offsets, start + torch.arange(start.shape[0], device=start.device)
        offsets, places = done[id(x.offsets)]
        return Jagged(x.values[places], offsets, x.max_length)

    groups = ({name: one(value) for name, value in group.items()} for group in
              (batch.sequences, batch.features, batch.labels))
    return Batch(*groups, batch.weights[order], batch.timestamps[order], batch.rows[order])


def describe(row: dict) -> str:
    """One printed line."""
    text = f"{row['impl']:<10}{row['samples_per_s']:8.0f} samples/s  batch {row['batch']:4d}"
    text += f"  NE {row['ne']:.4f}" if "ne" in row else ""
    for name in ("local_mfu", "e2e_mfu"):
        text += f"  {name} {row[name]:.1%}" if row[name] is not None else ""
    return text + (f"  {row['peak_gib']:.0f} GiB" if row["peak_gib"] is not None else "")


def overhead(out: Path | None, *_, config: Config | None = None, rounds: int = 8, steps: int = 20,
             repeats: int = 200, device: str = "cuda") -> list[dict]:
    """What always-on logging costs in the training loop of `train.py`, by two measures.

    `calls_us`: microseconds of each of its calls by itself, the device idle before it and waited for after it, so that
    all of it counts as if nothing ran beside it; `at_most`: what they come to a step, over the time of a step without
    a log. `share`: loops of `steps` steps without and with the log (a line at the last step, as a run writes one every
    20) in turns, median of the paired differences over that time. The small recipe at its batch size.
    """
    where, config = _device(device), config or small.recipe()
    law = {"lengths": "lognormal(512)", "max_length": 1024, "streams": 2}
    with tempfile.TemporaryDirectory() as folder:
        synthetic.build(Path(folder) / "data", users=2000, samples=8 * config.data.batch_size, **law)
        job = job_of(config, Path(folder) / "data", where, compiled=False)
        host = list(islice(job.loader(Path(folder) / "data", "train", training=True), 3))
        with RunLog(Path(folder) / "run", to_json(config), 0, steps, progress=False) as log:
            logged = _Logged(job, host, log)
            logged.loop(min(steps, 5), True)  # compilation, and the FLOPs of every length
            calls = logged.calls(repeats, max(1, repeats // steps))
            pairs = [[logged.loop(steps, on) for on in (False, True)] for _ in range(rounds)]
    without = statistics.median(first for first, _ in pairs)
    shares = [(second - first) / without for first, second in pairs]
    row = {"op": "train", "case": "logging_overhead", "impl": "opengem", "peer": None, "calls_us": calls,
           "at_most": (steps * (calls["count"] + calls["add"]) + calls["line"]) / 1e6 / without,
           "share": statistics.median(shares), "shares": shares, "step_ms": 1e3 * without / steps, "loops_s": pairs,
           "steps": steps, "repeats": repeats, "batch": host[0].batch_size}  # fmt: skip
    row |= environment(where) if where.type == "cuda" else {"gpu": "cpu"}
    each = ", ".join(f"{name} {us:.0f} us" for name, us in calls.items())
    record(row, f"logging costs at most {row['at_most']:.2%} of a step of {row['step_ms']:.1f} ms ({each}); {rounds} "
                f"pairs of loops differ by {row['share']:.2%}, from {min(shares):.2%} to {max(shares):.2%}", out)
    return [row]


class _Logged:
    """A training loop on batches that lie on the host, and the calls of logging in it."""

    def __init__(self, job: Job, host: list[Batch], log: RunLog) -> None:
        self.job, self.host, self.log, self.progress = job, host, log, Progress.of(job)
        self.rates = dict.fromkeys((label.name for label in job.schema.labels), 0.1)
        self.wait = torch.cuda.synchronize if job.device.type == "cuda" else lambda: None

    def loop(self, steps: int, logging: bool) -> float:
        """Seconds of `steps` training steps."""
        job = self.job
        self.wait()
        start = time.perf_counter()
        for on_host in islice(cycle(self.host), steps):
            if logging:
                self.progress.count(on_host)
            batch = on_host.to(job.device, non_blocking=True)
            logits = job.forward(batch)
            loss = job.loss(logits, batch)
            if logging:
                self.progress.add(logits, batch)
            step = job.learn(loss)
        if logging:
            self.line(step, batch)
        self.wait()
        return time.perf_counter() - start

    def line(self, step: Step, batch: Batch) -> None:
        self.job.embeddings.check()
        self.log.write(self.progress.line(self.job, step, batch, self.rates))

    def calls(self, repeats: int, lines: int) -> dict[str, float]:
        """Mean microseconds of each call alone."""
        batch = self.host[0].to(self.job.device)
        logits = self.job.forward(batch)
        step = self.job.learn(self.job.loss(logits, batch))
        every = {"count": (partial(self.progress.count, self.host[0]), repeats),
                 "add": (partial(self.progress.add, logits, batch), repeats),
                 "line": (partial(self.line, step, batch), lines)}  # fmt: skip
        return {name: statistics.mean(map(self._alone, [call] * times)) for name, (call, times) in every.items()}

    def _alone(self, call: Callable[[], None]) -> float:
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return 1e6 * (time.perf_counter() - start)
