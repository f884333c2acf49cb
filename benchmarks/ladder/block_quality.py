"""What block edges cost: one recipe with block, window and full attention on data with a known best NE, paired seeds.

    python -m benchmarks.ladder.block_quality --out FILE.jsonl [--seeds 0 1] [--parallel 6] [--samples 200000]

Two data sets are planted: one whose motifs lie inside blocks, one with the straddling motif as well. Every (data set,
attention, seed) is a process of its own, `parallel` of them at a time on one GPU, each with one thread; all of a data
set and seed see the same batches in the same order from the same initial weights. Printed beside each other: the NE of
block and window attention over that of full attention, seed by seed, and what the oracle says a model without the
straddling term pays.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

ATTENTIONS = ("full", "block", "window")
DATA = {"inside": ("count", "motif", "bias"), "straddle": ("count", "motif", "straddle", "bias")}


@dataclass(frozen=True)
class Arguments:
    """What to train and where to write."""

    out: Path
    seeds: tuple[int, ...] = (0, 1)
    parallel: int = 6
    """runs at a time"""
    samples: int = 200_000
    epochs: int = 1
    users: int = 10_000
    max_length: int = 512
    base_rate: float = 0.3
    strength: float = 2.0
    batch_size: int = 512
    limit_s: float = 140
    """a run that takes longer is ended and reported as such"""
    child: str = ""
    """internal: folder, data set, attention and seed of one run, as JSON"""


def make_data(folder: Path, name: str, arguments: Arguments) -> dict:
    """Write one data set and return its oracle's figures for clicks of the test split."""
    from opengem.data import synthetic

    synthetic.build(
        folder / name, users=arguments.users, samples=arguments.samples, lengths="fill(0.5)",
        max_length=arguments.max_length, base_rate=arguments.base_rate, strength=arguments.strength,
        mechanisms=DATA[name])
    return json.loads((folder / name / "oracle.json").read_text())["labels"]["click"]["splits"]["test"]


def run(folder: Path, data: str, attention: str, seed: int, arguments: Arguments) -> dict:
    """Train once and score the test split."""
    from opengem.cli import load_recipe
    from opengem.train import train

    config = load_recipe("tiny")
    stream = replace(config.model.streams[0], max_length=arguments.max_length, dim=128, heads=2, attention=attention)
    config = replace(
        config, model=replace(config.model, streams=(stream,)),
        data=replace(config.data, batch_size=arguments.batch_size),
        train=replace(config.train, seed=seed, epochs=arguments.epochs, progress=False, save_every=0))
    start = time.perf_counter()
    summary = train(config, folder / data, folder / f"{data}_{attention}_{seed}", with_baselines=False)
    scores = summary["splits"]["test"]["click"]
    return {"op": "quality", "case": f"synthetic_{data}", "impl": attention, "seed": seed, "task": "click",
            "ne": scores["ne"], "auc": scores["auc"], "rows": scores["rows"],
            "seconds": round(time.perf_counter() - start, 1), "samples_per_s": summary["samples_per_s"]}


def launch(folder: Path, data: str, attention: str, seed: int, arguments: Arguments) -> dict:
    """`run` in a process of its own."""
    task = json.dumps([str(folder), data, attention, seed])
    command = [sys.executable, "-m", "benchmarks.ladder.block_quality", *sys.argv[1:], "--child", task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit_s,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return {"case": f"synthetic_{data}", "impl": attention, "seed": seed, "error": f"over {arguments.limit_s} s"}
    if done.returncode:
        return {"case": f"synthetic_{data}", "impl": attention, "seed": seed, "error": done.stderr[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


def mean_and_error(values: list[float]) -> str:
    """Mean, standard error and number of the values."""
    if len(values) < 2:
        return f"{values}"
    return f"{statistics.mean(values):+.4f} +- {statistics.stdev(values) / len(values) ** 0.5:.4f} ({len(values)})"


def report(rows: list[dict], oracles: dict[str, dict]) -> list[str]:
    """Lines of NE against full attention, mean and standard error over the seeds, beside the oracle's price."""
    found = {(row["case"], row["impl"], row["seed"]): row["ne"] for row in rows if "ne" in row}
    seeds = sorted({seed for _, _, seed in found})
    lines = []
    for data, oracle in oracles.items():
        case = f"synthetic_{data}"
        price = oracle.get("without", {}).get("straddle", {}).get("price_percent")
        lines.append(f"{data}: best NE {oracle['label_ne']:.4f}, price of the straddling motif {price} %")
        for attention in ATTENTIONS:
            values = [found[case, attention, s] for s in seeds if (case, attention, s) in found]
            gaps = [100 * (found[case, attention, s] / found[case, "full", s] - 1) for s in seeds
                    if (case, attention, s) in found and (case, "full", s) in found]
            if values:
                lines.append(f"  {attention:<7} NE {mean_and_error(values)}, over full % {mean_and_error(gaps)}")
    return lines


def main(arguments: Arguments) -> None:
    """Make the data, train everything, append the rows and print the report."""
    if arguments.child:
        folder, data, attention, seed = json.loads(arguments.child)
        print(json.dumps(run(Path(folder), data, attention, seed, arguments)))
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.parallel) as pool:
        folder = Path(name)
        oracles = dict(zip(DATA, pool.map(lambda data: make_data(folder, data, arguments), DATA), strict=True))
        tasks = [(data, attention, seed) for seed in arguments.seeds for data in DATA for attention in ATTENTIONS]
        for row in pool.map(lambda task: launch(folder, *task, arguments), tasks):
            with open(arguments.out, "a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    print("\n".join(report(rows, oracles)))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
