"""`opengem bench train`: the medium recipe on one GPU, from an honest baseline up, one technique at a time.

Every rung trains the same parameters on the same synthetic stream (log-normal histories to 4,096 events, fill about
.5) at the same batch size, which gives its NE; then it is timed and profiled at the largest batch that fits.
A rung is what the package does, with each technique that is not yet on replaced by plain PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import train_plain as plain
from benchmarks.run import ceilings, environment, record
from benchmarks.train_baseline import Baseline
from opengem.config import Config
from opengem.data import synthetic
from opengem.data.batch import Batch
from opengem.data.schema import Schema
from opengem.efficiency import profile
from opengem.job import Job, build
from opengem.kernels import backend
from opengem.loss import Meter
from opengem.metrics import entropy
from recipes import medium

MODEL = "opengem.model"
STREAM = dict(users=512, samples=16_384, lengths="lognormal(2650)", max_length=4096, streams=3, items=1 << 20,
              base_rate=0.3, strength=3.0)  # fmt: skip
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
# technique -> what stands in for it while it is off: (target, replacement)
STAND_INS = {
    "jagged": ((f"{MODEL}.interaction.jagged_flash_attention", plain.dense_attention),),
    "gdpa": ((f"{MODEL}.attention.gdpa", plain.gdpa),),
    "block": (
        (f"{MODEL}.attention.block_attention", plain.block_attention),
        (f"{MODEL}.attention.apply_rope", plain.apply_rope),
    ),
    "norm": tuple(
        (f"{MODEL}.{at}.{op}", getattr(plain, op))
        for at, op in (("attention", "layer_norm"), ("attention", "rms_norm"), ("blocks", "layer_norm"),
                       ("gem", "layer_norm"), ("heads", "layer_norm"), ("interaction", "layer_norm"))
    ),
}


@contextlib.contextmanager
def only(techniques: tuple[str, ...]) -> Iterator[None]:
    """The package with every technique that is not among `techniques` replaced by its stand-in."""
    with contextlib.ExitStack() as stack:
        for technique, targets in STAND_INS.items():
            for target, replacement in targets if technique not in techniques else ():
                stack.enter_context(patch(target, replacement))
        if "sparse" not in techniques:
            stack.enter_context(patch.dict(backend.TABLE, {"sparse_lookup": ()}))
        yield


def run(out: Path | None, ladder: bool, rungs: tuple[str, ...] = (), samples: int = 2048, batch: int = 64,
        config: Config | None = None, device: str = "cuda") -> list[dict]:
    """Measure the rungs (all with `ladder`, else the last), append rows to `out`, return them.

    rungs: only these. samples, batch: of the stream that gives the NE.
    """
    chosen = [rung for rung in LADDER if rung.technique in rungs] or list(LADDER[0 if ladder else -1 :])
    where, config = torch.device(device), config or medium.recipe()
    facts = environment(where) | ceilings(where) if where.type == "cuda" else {"gpu": "cpu"}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        synthetic.build(Path(folder) / "data", **STREAM)
        for rung in chosen:
            techniques = tuple(r.technique for r in LADDER[: LADDER.index(rung) + 1])
            row = measure(config, Path(folder) / "data", techniques, samples, batch, where)
            row |= {"technique": rung.what, "article": rung.article} | facts
            rows.append(row)
            record(row, describe(row), out)
    return rows


def measure(config: Config, data: Path, techniques: tuple[str, ...], samples: int, size: int,
            device: torch.device) -> dict:
    """One row: NE of a stream of `samples` at batch `size`, then speed at the largest batch that fits."""
    name = techniques[-1]
    row = {"op": "train", "case": f"{config.name}_ladder", "impl": name, "peer": None, "techniques": list(techniques)}
    warmup = replace(config.optim, warmup_steps=max(1, samples // size // 4))
    config = replace(config, optim=warmup)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with only(techniques):
        job = _job(config, data, device, compiled=name == "baseline")
        layers_of = job.model.layers if name == "baseline" else None
        print(f"{name}: built", flush=True)
        row |= _quality(job, data, samples, size)
        print(f"{name}: NE {row['ne']:.4f}", flush=True)
        sized = partial(_batch, job, data)
        batch = profile.largest_batch(job, sized, size, LIMIT) if device.type == "cuda" else sized(size)
        result = profile.measure(job, batch, warmup=2, steps=6, layers_of=layers_of)
    row |= summary(result)
    row["peak_gib"] = result["peak_bytes"] and result["peak_bytes"] / 2**30
    del job, batch
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
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


def _job(config: Config, data: Path, device: torch.device, compiled: bool) -> Job:
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


def _quality(job: Job, data: Path, samples: int, size: int) -> dict:
    """Progressive NE of the first label: every batch is predicted, then learned from."""
    meter = Meter(job.schema.labels, job.device)
    job.total_steps = samples // size
    for batch in islice(_batches(job, data, size), samples // size):
        logits = job.forward(batch)
        meter.add({name: value.detach() for name, value in logits.items()}, batch)
        if not job.learn(job.loss(logits, batch))[0]:
            raise RuntimeError("non-finite loss or gradient")
    weight, loss, label, _ = meter.read()[job.schema.labels[0].name]
    return {"ne": loss / weight / entropy(label / weight), "ne_samples": samples, "ne_batch": size}


def describe(row: dict) -> str:
    """One printed line."""
    text = f"{row['impl']:<10}{row['samples_per_s']:8.0f} samples/s  batch {row['batch']:4d}  NE {row['ne']:.4f}"
    for name in ("local_mfu", "e2e_mfu"):
        text += f"  {name} {row[name]:.1%}" if row[name] is not None else ""
    return text + (f"  {row['peak_gib']:.0f} GiB" if row["peak_gib"] is not None else "")
