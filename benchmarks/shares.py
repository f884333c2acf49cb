"""How much of each planted mechanism a model has found, step by step, on synthetic data whose best NE is known.

    python -m benchmarks.shares --data DIR --recipe tiny|FILE.json --out FILE.jsonl [--every 200] [--seconds 240]

Trains as `opengem train` does. Every `--every` steps a row: NE of the predictions made before learning, NE of the true
chances on the same labels, and of each planted term the share of its weight that a linear regression of the logit
finds. The last rows score the test split strictly (the model as it is at the end of the pass) and progressively.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import tyro

from benchmarks.run import environment as gpu_environment
from opengem.cli import load_recipe
from opengem.data.schema import Schema
from opengem.evaluate import score, score_progressively
from opengem.job import Job, build
from opengem.runlog import environment
from opengem.train import Feed, Progress

PROBE = 60
"""steps after which `--seconds` decides how many there will be"""


@dataclass(frozen=True)
class Arguments:
    """What to train and where to write."""

    data: Path
    out: Path
    recipe: str = "small"
    name: str = "whole"
    """of the run, in its rows"""
    seed: int = 0
    every: int = 200
    """steps between rows"""
    seconds: float = 0
    """of training, from which the number of steps and so the fall of the rate are set (0: one pass)"""
    progressive: bool = True
    """score the test split progressively as well"""


@dataclass(frozen=True)
class Truth:
    """What oracle.parquet knows of every row: chance of a click, terms `[N, mechanisms]` and their weights."""

    p: np.ndarray
    terms: np.ndarray
    weights: dict[str, float]

    @classmethod
    def of(cls, data: Path, label: str = "click") -> Truth:
        weights = json.loads((data / "oracle.json").read_text())["labels"][label]["weights"]
        table = pq.read_table(data / "oracle.parquet")
        terms = np.stack([table[f"term.{name}"].to_numpy() for name in weights], 1)
        return cls(table[f"p.{label}"].to_numpy(), terms, weights)

    def scores(self, rows: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """`ne` of these logits and `best_ne` of the truth on the same labels, both over the entropy of their mean."""
        p, rate = self.p[rows].astype(np.float64), labels.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        ne = np.mean(np.logaddexp(0, logits) - labels * logits) / entropy
        best = -np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p)) / entropy
        scores = {"rows": len(rows), "ne": ne, "best_ne": best, "over_best_percent": 100 * (ne / best - 1)}
        return scores | {"found": self.shares(rows, logits)}

    def shares(self, rows: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Coefficients of the terms in a linear regression of the logits, over their weights: 1 is all of it."""
        basis = np.column_stack([np.ones(len(rows)), self.terms[rows]])
        fit = np.linalg.lstsq(basis, logits.clip(-15, 15), rcond=None)[0][1:]
        return {name: float(a / weight) for a, (name, weight) in zip(fit, self.weights.items(), strict=True)}


class Scored:
    """Rows, logits and labels of clicks since the last `take`."""

    def __init__(self) -> None:
        self.parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, rows: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.parts.append((rows, logits.detach().float(), labels))

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, logits, labels = (torch.cat(part).cpu().numpy() for part in zip(*self.parts, strict=True))
        self.parts = []
        return rows, logits.astype(np.float64), labels.astype(np.float64)


def main(arguments: Arguments) -> None:
    """Train, score, append every row as soon as it is known."""
    config = load_recipe(arguments.recipe)
    config = replace(config, train=replace(config.train, seed=arguments.seed))
    truth, job = Truth.of(arguments.data), build(config, Schema.load(arguments.data))
    facts = gpu_environment(job.device) if job.device.type == "cuda" else environment(job.device)
    head = {"op": "mechanisms", "case": "synthetic", "impl": arguments.name, "recipe": config.name}
    head |= {"seed": arguments.seed, "batch_size": config.data.batch_size, "lr": config.optim.lr}
    head |= {"taps": [stream.taps for stream in config.model.streams]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def write(mode: str, scores: dict[str, Any], seconds: float) -> None:
        row = head | {"mode": mode, "step": job.step, "seconds": seconds} | scores
        shares = " ".join(f"{name} {share:.2f}" for name, share in scores["found"].items())
        print(f"{arguments.name:<16}{mode:<12}step {job.step:6d} {seconds:5.0f} s  NE {row['ne']:.4f} best "
              f"{row['best_ne']:.4f} {row['over_best_percent']:+.2f} %  {shares}", flush=True)  # fmt: skip
        with open(arguments.out, "a") as file:
            file.write(json.dumps(row | facts) + "\n")

    start = time.perf_counter()
    pass_over(job, arguments, lambda scored: write("online", truth.scores(*scored), time.perf_counter() - start))
    for mode in ("strict", "progressive")[: 1 + arguments.progressive]:
        scored = score_test(job, arguments.data, score_progressively if mode == "progressive" else score)
        write(mode, truth.scores(*scored), time.perf_counter() - start)


def pass_over(job: Job, arguments: Arguments, report: Callable) -> None:
    """One pass over the training split, or as much of it as the seconds allow."""
    loader = job.loader(arguments.data, job.config.data.train_split, training=True)
    job.total_steps = min(job.config.train.steps or len(loader), len(loader))
    start, scored = time.perf_counter(), Scored()
    job.model.train()
    feed = Feed(job, loader, Progress.of(job))
    for batch, ids in feed:
        logits = job.forward(batch, ids)
        feed.ahead()
        scored.add(batch.rows, logits["click"], batch.labels["click"])
        step = job.learn(job.loss(logits, batch))
        if job.step == PROBE // 3:
            step.finite()  # waits for the device
            first = time.perf_counter()
        if job.step == PROBE and arguments.seconds:
            step.finite()
            now = time.perf_counter()
            left = (arguments.seconds - (now - start)) / (now - first) * (PROBE - PROBE // 3)
            job.total_steps = min(job.total_steps, PROBE + max(1, int(left)))
        if job.step % arguments.every == 0 or job.step == job.total_steps:
            if not step.finite():
                raise SystemExit(f"step {job.step}: loss or gradient is not finite")
            report(scored.take())
        if job.step == job.total_steps:
            return


def score_test(job: Job, data: Path, how: Callable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, click logits and labels of the test split."""
    scored = Scored()
    for batch, chances in how(job, job.loader(data, "test", training=how is score_progressively)):
        chance = chances["click"].double().clamp(1e-7, 1 - 1e-7)
        scored.add(batch.rows, torch.logit(chance), batch.labels["click"])
    return scored.take()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
