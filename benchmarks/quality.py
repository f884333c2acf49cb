"""Quality on a data set, seed by seed, beside the baselines of the same rows.

    python -m benchmarks.quality --data DIR --recipe small --seeds 0 1 2 --features none all --out FILE.jsonl
    python -m benchmarks.quality ... --history 64 --set optim.lr=2e-3 sparse.lr=0.5     and the rows' `impl` says so

Each (features, seed) is trained once, scored strictly (the model as it was when training ended) and progressively (each
batch is predicted, then learned from), and appended as rows of `op = "quality"`. The last lines printed are mean and
spread over the seeds in FILE, and the ratio to each baseline: several runs may append to one file, also side by side,
and a run without seeds only prints.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from benchmarks.run import environment as gpu_environment
from opengem import baselines
from opengem.cli import load_recipe
from opengem.config import Config, StreamConfig, from_json, to_json
from opengem.data.labels import base_rates
from opengem.data.schema import Schema
from opengem.errors import UserError
from opengem.evaluate import evaluate_split
from opengem.job import open_run
from opengem.runlog import environment
from opengem.train import train


@dataclass(frozen=True)
class Arguments:
    """What to train and where to write."""

    data: Path
    out: Path
    recipe: str = "small"
    seeds: tuple[int, ...] = (0, 1, 2)
    features: tuple[str, ...] = ("none", "all")
    """optional features as inputs: none of them, all, or names and patterns separated by commas"""
    history: int = 0
    """newest events of every stream that are looked up; those before are only counted (0: as the recipe says)"""
    set: tuple[str, ...] = ()
    """other fields of the recipe, as section.field=value"""
    split: str = "test"
    baselines: bool = True


def main(arguments: Arguments) -> None:
    """Run everything the arguments ask for; every score is on disk before the next one is worked on."""
    schema = Schema.load(arguments.data)
    facts = gpu_environment(torch.device("cuda")) if torch.cuda.is_available() else environment(torch.device("cpu"))
    if arguments.baselines:
        for name, splits in baselines.compute(arguments.data, schema, eval_splits=(arguments.split,)).items():
            _append(arguments.out, _rows(schema, name, splits[arguments.split], "strict", None), facts)
    for features in arguments.features:
        for seed in arguments.seeds:
            config = _config(arguments, features, seed)
            _one(config, arguments, schema, _name(arguments, features), seed, facts)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.is_file() else []
    print("\n".join(_summary([row for row in rows if row["case"] == schema.name])))


def _name(arguments: Arguments, features: str) -> str:
    history = [f"histories of {arguments.history}"] if arguments.history else []
    return ", ".join([arguments.recipe, f"{features} optional features", *history, *arguments.set])


def _config(arguments: Arguments, features: str, seed: int) -> Config:
    config = changed(load_recipe(arguments.recipe), arguments.set)
    optional = {"none": (), "all": ("*",)}.get(features, tuple(features.split(",")))
    data = replace(config.data, optional_features=optional, eval_splits=(arguments.split,))
    if arguments.history:
        streams = tuple(_shorter(stream, arguments.history) for stream in config.model.streams)
        config = replace(config, model=replace(config.model, streams=streams))
    return replace(config, data=data, train=replace(config.train, seed=seed, progress=False, save_every=0))


def _shorter(stream: StreamConfig, length: int) -> StreamConfig:
    """The same events in sight, `length` of them looked up."""
    return replace(stream, max_length=length, counted=max(0, stream.max_length + stream.counted - length))


def changed(config: Config, fields: tuple[str, ...]) -> Config:
    """`config` with fields set, each given as "section.field=value". UserError for one that does not exist or fit."""
    raw = json.loads(to_json(config))
    for text in fields:
        name, _, value = text.partition("=")
        section, _, field = name.partition(".")
        try:
            raw.setdefault(section, {})[field] = json.loads(value)
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"--set {text}: wanted section.field=value, the value as JSON") from error
    return from_json(json.dumps(raw), "--set")


def _one(config: Config, arguments: Arguments, schema: Schema, name: str, seed: int, facts: dict) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        summary = train(config, arguments.data, run, with_baselines=False)
        facts = facts | {"samples_per_s": summary["samples_per_s"]}

        def write(scores: dict, mode: str) -> None:
            rows = _rows(schema, name, scores, mode, seed)
            _append(arguments.out, [row | {"seconds": time.perf_counter() - start} for row in rows], facts)

        write(summary["splits"][arguments.split], "strict")
        job = open_run(run, arguments.data)
        rates = base_rates(arguments.data, schema, config.data.train_split)
        write(evaluate_split(job, arguments.data, arguments.split, rates, progressive=True), "progressive")


def _rows(schema: Schema, name: str, tasks: dict[str, dict], mode: str, seed: int | None) -> list[dict]:
    head = {"op": "quality", "case": schema.name, "impl": name, "peer": name if seed is None else None}
    keys = ("ne", "auc", "logloss", "calibration", "rows")
    return [
        head | {"mode": mode, "seed": seed, "task": task} | {key: scores[key] for key in keys}
        for task, scores in tasks.items()
    ]


def _append(out: Path, rows: list[dict], facts: dict) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a") as file:
        for row in rows:
            print({key: row[key] for key in ("impl", "seed", "mode", "task", "ne", "auc")}, flush=True)
            file.write(json.dumps(row | facts) + "\n")


def _summary(rows: list[dict]) -> list[str]:
    """Mean and spread over seeds of each (impl, mode, task), and the ratio of its NE to every baseline's."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["impl"], row["mode"], row["task"]), []).append(row)
    peers = {key: group[0] for key, group in groups.items() if group[0]["peer"]}
    lines = []
    for (impl, mode, task), group in groups.items():
        ne, auc = ([row[key] for row in group if row[key] is not None] for key in ("ne", "auc"))
        if not ne:
            continue
        spread = max(ne) - min(ne)
        against = [
            f"{p} x{statistics.mean(ne) / r['ne']:.4f}" for (p, _, t), r in peers.items() if t == task and r["ne"]
        ]
        mean_auc = f"{statistics.mean(auc):.4f}" if auc else "undefined"
        lines.append(
            f"{impl:<34}{mode:<12}{task:<10}NE {statistics.mean(ne):.4f} (spread {spread:.4f}, {len(ne)} runs) "
            f"AUC {mean_auc}  {'  '.join(against) if (impl, mode, task) not in peers else ''}"
        )
    return lines


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
