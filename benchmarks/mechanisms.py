"""How near a recipe comes to the best possible NE, and what each of its modules is worth, on data where both are known.

    python -m benchmarks.mechanisms --out FILE.jsonl [--samples 2000000] [--seeds 0] [--without edges self_attention]

Synthetic data with all mechanisms is planted (docs/synthetic.md), then the recipe is trained as `opengem train` trains
it: once whole, and once without each module of `MODULES`, side by side. What a module's removal costs is held against
what the best prediction without its mechanisms would pay. The test split is scored twice: strictly, and progressively
(each batch is predicted, then learned from), which is fair to a planted drift.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from opengem.cli import load_recipe
from opengem.config import Config, to_json

WHOLE = "whole"
MODULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    WHOLE: ({}, ()),
    "edges": ({"stream.attention": "block", "stream.window": 64}, ("straddle",)),
    "self_attention": ({"stream.attention": "none"}, ("motif", "straddle")),
    "counting": ({"model.match": False, "model.counting_heads": 0, "model.time_encoding": False}, ("count", "recency")),
    "interaction": ({"model.fm_tokens": 0}, ("cross",)),
    "tables": ({"sparse.max_rows": 16}, ("bias",)),
    "order": ({"data.shuffle_rows": 1 << 30}, ("drift",)),
}
"""what is taken away -> (fields of the config, the mechanisms whose signal it is there for)"""
DRAWS = 64
"""points over which the law of the missing terms is averaged"""


@dataclass(frozen=True)
class Arguments:
    """What to plant, what to train, where to write."""

    out: Path
    without: tuple[str, ...] = tuple(MODULES)
    """runs: whole, and the modules to take away"""
    seeds: tuple[int, ...] = (0,)
    recipe: str = "small"
    attention: tuple[str, int] = ("window", 32)
    """self-attention of the whole model: kind, and block length or events visible to each side"""
    batch_size: int = 512
    samples: int = 2_000_000
    users: int = 50_000
    base_rate: float = 0.05
    strength: float = 1.5
    max_length: int = 128
    parallel: int = 7
    """runs at a time on the one device"""


def main(arguments: Arguments) -> None:
    """Plant, train everything, append a row as each run ends, print the table."""
    if unknown := [name for name in arguments.without if name not in MODULES]:
        raise SystemExit(f"--without {unknown[0]}: must be some of {', '.join(MODULES)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.parallel) as pool:
        data, runs, rows = Path(name) / "data", Path(name), []
        _plant(data, arguments)
        oracle = json.loads((data / "oracle.json").read_text())["labels"]["click"]
        prices = {name: 100 * (joint_price(data, oracle, MODULES[name][1]) - 1) for name in arguments.without}
        tasks = [(name, seed) for seed in arguments.seeds for name in arguments.without]
        for found in pool.map(lambda task: _one(data, runs, *task, arguments), tasks):
            for row in found:
                best = oracle["splits"]["test"]["label_ne"]
                rows.append(row | {"best_ne": best, "price_percent": prices[row["impl"]]})
                with open(arguments.out, "a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))


def _plant(folder: Path, arguments: Arguments) -> None:
    from opengem.data import synthetic

    synthetic.build(
        folder, users=arguments.users, samples=arguments.samples, max_length=arguments.max_length,
        base_rate=arguments.base_rate, strength=arguments.strength)


def joint_price(folder: Path, oracle: dict, missing: tuple[str, ...], split: str = "test") -> float:
    """NE of the best prediction that sees none of the terms `missing`, over the best NE, on the rows of `split`.

    The sum of the missing terms is averaged over its law, taken to be that of other rows (as for all terms but the
    motifs in oracle.json; motifs of longer histories vary a little more than this lets them).
    """
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "oracle.parquet")
    bounds = {"train": (0, oracle["splits"]["train"]["label_rows"])}
    bounds["test"] = (bounds["train"][1], table.num_rows)
    rows = slice(*bounds[split])
    p = table["p.click"].to_numpy()[rows].astype(np.float64)
    lost = sum((oracle["weights"][m] * table[f"term.{m}"].to_numpy()[rows] for m in missing), np.zeros(len(p)))
    rest = np.log(p / (1 - p)) - lost
    law = np.quantile(lost, (np.arange(DRAWS) + 0.5) / DRAWS)
    q = np.mean([1 / (1 + np.exp(-(rest + value))) for value in law], axis=0)
    return float(_loss(p, q) / _loss(p, p))


def _loss(p: np.ndarray, q: np.ndarray) -> float:
    return float(-(p * np.log(q) + (1 - p) * np.log1p(-q)).mean())


def config(name: str, arguments: Arguments) -> Config:
    """The recipe for this data, without the module `name`."""
    whole = load_recipe(arguments.recipe)
    kind, window = arguments.attention
    (stream,) = whole.model.streams
    changed = {
        "data": {"batch_size": arguments.batch_size},
        "stream": {"max_length": arguments.max_length, "attention": kind, "window": window},
        "model": {}, "sparse": {},
    }  # fmt: skip
    for field, value in MODULES[name][0].items():
        part, field = field.split(".")
        changed[part][field] = value
    model = replace(whole.model, streams=(replace(stream, **changed["stream"]),), **changed["model"])
    data, sparse = replace(whole.data, **changed["data"]), replace(whole.sparse, **changed["sparse"])
    return replace(whole, model=model, data=data, sparse=sparse)


def _one(data: Path, runs: Path, name: str, seed: int, arguments: Arguments) -> list[dict]:
    """Rows of one model, trained and scored in a process of its own, one a mode; or a row with `error`."""
    recipe, out = runs / f"{name}_{seed}.json", runs / f"{name}_{seed}.jsonl"
    recipe.write_text(to_json(config(name, arguments)))
    command = [sys.executable, "-m", "benchmarks.quality", "--data", str(data), "--out", str(out), "--no-baselines"]
    command += ["--recipe", str(recipe), "--seeds", str(seed), "--features", "none"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    head = {"impl": name, "recipe": arguments.recipe, "batch_size": arguments.batch_size, "samples": arguments.samples}
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if done.returncode:
        rows.append({"op": "quality", "case": "synthetic", "seed": seed, "error": done.stderr[-500:]})
    return [row | head for row in rows if row.get("task") != "convert"]


def table(rows: list[dict]) -> list[str]:
    """Mean test NE of every model in every mode over the best one, its price over the whole model, and the oracle's."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if "error" in row:
            print(f"{row['impl']}, seed {row['seed']}: {row['error']}", file=sys.stderr)
        else:
            found.setdefault((row["mode"], row["impl"]), []).append(row)
    lines = []
    for (mode, name), group in found.items():
        ne = statistics.mean(row["ne"] for row in group)
        line = f"{mode:<12}{name:<16}NE {ne:.4f}, over the best {100 * (ne / group[0]['best_ne'] - 1):+.2f} %"
        if name != WHOLE and (mode, WHOLE) in found:
            whole = statistics.mean(row["ne"] for row in found[mode, WHOLE])
            line += f", over whole {100 * (ne / whole - 1):+.2f} % (oracle {group[0]['price_percent']:+.2f} %)"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
