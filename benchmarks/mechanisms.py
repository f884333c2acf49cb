"""How near a recipe comes to the best possible NE, and what each of its modules is worth, on data where both are known.

    python -m benchmarks.mechanisms --out FILE.jsonl [--samples 2000000] [--seeds 0] [--without taps interaction]

Synthetic data with all mechanisms is planted (docs/synthetic.md), then the recipe is trained as `opengem train` trains
it: once whole, and once without each module of `MODULES`, side by side. What a module's removal costs is held against
what the best prediction without its mechanisms would pay. The test split is scored twice: strictly, and progressively
(each batch is predicted, then learned from), which is fair to a planted drift. `shares.py` beside it trains and scores.
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
import pyarrow.parquet as pq
import tyro

from opengem.cli import load_recipe
from opengem.config import Config, to_json

WHOLE = "whole"
TABLE_ROWS = 16
"""of tables too small for 64 segments and 256 items, but not for the 16 categories"""
MODULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    WHOLE: ({}, ()),
    "taps": ({"stream.taps": 1}, ("motif", "straddle")),
    "order": ({"stream.taps": 1, "stream.attention": "none"}, ("motif", "straddle")),
    "counting": ({"model.match": False, "model.counting_heads": 0, "model.time_encoding": False}, ("count", "recency")),
    "interaction": ({"model.fm_tokens": 0}, ("cross",)),
    "tables": ({"sparse.max_rows": TABLE_ROWS}, ("bias",)),
    "time_order": ({"data.shuffle_rows": 1 << 30}, ("drift",)),
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
    taps: int = 3
    """of the whole model's events"""
    batch_size: int = 512
    lr: float = 1e-3
    sparse_lr: float = 0.15
    final_lr_fraction: float = 0.05
    seconds: float = 0
    """of training, each run (0: one pass)"""
    every: int = 200
    progressive: bool = True
    data: Path | None = None
    """data that was planted before (None: plant it)"""
    samples: int = 2_000_000
    users: int = 50_000
    base_rate: float = 0.3
    strength: float = 2.0
    max_length: int = 128
    parallel: int = 7
    """runs at a time on the one device"""


def main(arguments: Arguments) -> None:
    """Plant, train everything, print the table; every row is appended as soon as it is known."""
    if unknown := [name for name in arguments.without if name not in MODULES]:
        raise SystemExit(f"--without {unknown[0]}: must be some of {', '.join(MODULES)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.parallel) as pool:
        data = arguments.data or Path(name) / "data"
        if arguments.data is None:
            _plant(data, arguments)
        tasks = [(name, seed) for seed in arguments.seeds for name in arguments.without]
        runs = [pool.submit(_one, data, Path(name), *task, arguments) for task in tasks]
        for module in arguments.without:  # beside the training
            _append(arguments.out, {"mode": "oracle", "impl": module, "price_percent": 100 * (price(data, module) - 1)})
        for run in runs:
            run.result()
    print("\n".join(table([json.loads(line) for line in arguments.out.read_text().splitlines()])))


def _append(out: Path, row: dict) -> None:
    with open(out, "a") as file:
        file.write(json.dumps({"op": "mechanisms", "case": "synthetic"} | row) + "\n")


def _plant(folder: Path, arguments: Arguments) -> None:
    from opengem.data import synthetic

    synthetic.build(
        folder, users=arguments.users, samples=arguments.samples, max_length=arguments.max_length,
        base_rate=arguments.base_rate, strength=arguments.strength)


def price(folder: Path, module: str, split: str = "test") -> float:
    """NE of the best prediction without a module, over the best with it, on the rows of `split`, scored strictly.

    Without its mechanisms, but for what is left to it: small tables still know the mean bias of the segments that
    share a row, and of the items that share a row, an advertiser and a sign; a pass in any order knows each
    advertiser's mean drift over the training split, which is worse than nothing where the drift has turned by the test
    (the best with time order knows the drift at the end of training).
    """
    columns = pq.read_table(folder / "samples", columns=["segment", "item", "advertiser", "ad_sign"])
    ids = {name: columns[name].to_numpy() for name in columns.column_names}
    oracle, kept, whole = json.loads((folder / "oracle.json").read_text()), {}, 1.0
    if module == "tables":
        fit = oracle["terms"]["bias"]
        segment, item = (np.array(oracle["terms"][name])[ids[name]] for name in ("segment", "item"))
        known = _mean(segment, ids["segment"] % TABLE_ROWS)
        known += _mean(item, ids["item"] % TABLE_ROWS, ids["advertiser"], ids["ad_sign"])
        kept["bias"] = (known - fit["centre"]) / fit["scale"]
    if module == "time_order":
        drift = pq.read_table(folder / "oracle.parquet", columns=["term.drift"])["term.drift"].to_numpy()
        train, advertiser = _bounds(oracle, "train").stop, ids["advertiser"]
        kept["drift"], newest = (_drift(drift[rows], advertiser[rows])[advertiser] for rows in (
            slice(0, train), slice(int(0.99 * train), train)))  # fmt: skip
        whole = joint_price(folder, ("drift",), split, {"drift": newest})
    return joint_price(folder, MODULES[module][1], split, kept) / whole


def _mean(values: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """For each row the mean of `values` over the rows that agree with it in all keys (small integers)."""
    group = np.ravel_multi_index(keys, [key.max() + 1 for key in keys])
    return (np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group]


def _drift(drift: np.ndarray, advertiser: np.ndarray) -> np.ndarray:
    """The mean drift of each advertiser."""
    return np.bincount(advertiser, drift) / np.bincount(advertiser)


def _bounds(oracle: dict, split: str) -> slice:
    train = oracle["rows"]["train"]
    return slice(0, train) if split == "train" else slice(train, train + oracle["rows"]["test"])


def joint_price(folder: Path, missing: tuple[str, ...], split: str = "test", kept: dict | None = None) -> float:
    """NE of the best prediction that sees none of the terms `missing`, over the best NE, on the rows of `split`.

    The sum of the missing terms is averaged over its law, taken to be that of other rows (as for all terms but the
    motifs in oracle.json; motifs of longer histories vary a little more than this lets them). kept: term -> what is
    still known of it, for each row.
    """
    oracle = json.loads((folder / "oracle.json").read_text())
    table, rows = pq.read_table(folder / "oracle.parquet"), _bounds(oracle, split)
    weights = oracle["labels"]["click"]["weights"]
    p = table["p.click"].to_numpy()[rows].astype(np.float64)
    lost = np.zeros(len(p))
    for name in missing:
        known = (kept or {}).get(name, np.zeros(table.num_rows))[rows]
        lost += weights[name] * (table[f"term.{name}"].to_numpy()[rows] - known)
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
    changed: dict[str, dict[str, Any]] = {
        "data": {"batch_size": arguments.batch_size},
        "stream": {"max_length": arguments.max_length, "attention": kind, "window": window, "taps": arguments.taps},
        "model": {}, "sparse": {"lr": arguments.sparse_lr},
    }  # fmt: skip
    for field, value in MODULES[name][0].items():
        part, field = field.split(".")
        changed[part][field] = value
    optim = replace(whole.optim, lr=arguments.lr, final_lr_fraction=arguments.final_lr_fraction)
    model = replace(whole.model, streams=(replace(stream, **changed["stream"]),), **changed["model"])
    data, sparse = replace(whole.data, **changed["data"]), replace(whole.sparse, **changed["sparse"])
    return replace(whole, model=model, data=data, sparse=sparse, optim=optim)


def _one(data: Path, recipes: Path, name: str, seed: int, arguments: Arguments) -> None:
    """Train and score one model in a process of its own, which appends its rows; or append a row with `error`."""
    recipe = recipes / f"{name}_{seed}.json"
    recipe.write_text(to_json(config(name, arguments)))
    command = [sys.executable, "-m", "benchmarks.shares", "--data", str(data), "--out", str(arguments.out)]
    command += ["--recipe", str(recipe), "--name", name, "--seed", str(seed), "--every", str(arguments.every)]
    command += ["--seconds", str(arguments.seconds), *([] if arguments.progressive else ["--no-progressive"])]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        _append(arguments.out, {"mode": "error", "impl": name, "seed": seed, "error": done.stderr[-500:]})


def table(rows: list[dict]) -> list[str]:
    """Mean test NE of every model in every mode over the best one, its price over the whole model, and the oracle's."""
    prices = {row["impl"]: row["price_percent"] for row in rows if row["mode"] == "oracle"}
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if row["mode"] == "error":
            print(f"{row['impl']}, seed {row['seed']}: {row['error']}", file=sys.stderr)
        if row["mode"] in ("strict", "progressive"):
            found.setdefault((row["mode"], row["impl"]), []).append(row)
    lines = []
    for (mode, name), group in found.items():
        ne, best = (statistics.mean(row[key] for row in group) for key in ("ne", "best_ne"))
        line = f"{mode:<12}{name:<16}NE {ne:.4f}, over the best {100 * (ne / best - 1):+.2f} %"
        if name != WHOLE and (mode, WHOLE) in found:
            whole = statistics.mean(row["ne"] for row in found[mode, WHOLE])
            line += f", over whole {100 * (ne / whole - 1):+.2f} % (oracle {prices[name]:+.2f} %)"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
