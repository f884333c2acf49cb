"""NE of every rung of the training ladder on one stream, from the same parameters: equal, as far as rounding goes.

    python -m benchmarks.train_ne --recipe small --out FILE.jsonl
    python -m benchmarks.train_ne --recipe tiny --device cpu --samples 6144 --batch 32

Each rung learns twice, with the samples of every batch in two orders: what lies between the two is what the order of
summation makes of one function, the yardstick for what lies between rungs.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import train
from benchmarks.run import environment, record
from opengem.cli import load_recipe
from opengem.config import Config
from opengem.data import synthetic

TECHNIQUES = tuple(rung.technique for rung in train.LADDER)


def run(config: Config, device: torch.device, out: Path | None, samples: int, size: int,
        rungs: tuple[str, ...] = TECHNIQUES) -> list[dict]:
    """One row a rung: `ne` in the order of the data, `ne_orders` in both. size: samples of a batch."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "data", config, samples)
        for rung in rungs:
            rows.append(measure(config, Path(folder) / "data", rung, samples, size, device))
            record(rows[-1], f"{rung:<10} NE {'  '.join(f'{ne:.5f}' for ne in rows[-1]['ne_orders'])}", out)
    return rows


def build(folder: Path, config: Config, samples: int) -> None:
    """The ladder's mechanisms, in histories of half the longest that the recipe keeps and of ids that come back."""
    longest = max(stream.max_length for stream in config.model.streams)
    law = {"lengths": f"lognormal({longest / 2})", "max_length": longest, "streams": 2, "items": 4096}
    synthetic.build(folder, **train.STREAM | law | {"users": 2048, "samples": -(-samples * 5 // 4)})


def measure(config: Config, data: Path, rung: str, samples: int, size: int, device: torch.device) -> dict:
    """The row of one rung."""
    found = []
    for order in range(2):
        with train.only(TECHNIQUES[: TECHNIQUES.index(rung) + 1]):
            job = train.job_of(config, data, device, compiled=rung == "baseline")
            found.append(train.quality(job, data, samples, size, order)["ne"])
    row = {"op": "train", "case": f"{config.name}_ladder_ne", "impl": rung, "peer": None, "ne": found[0],
           "ne_orders": found, "ne_samples": samples, "ne_batch": size, "lr": config.optim.lr,
           "dtype": str(job.dtype).removeprefix("torch.")}  # fmt: skip
    return row | (environment(device) if device.type == "cuda" else {"gpu": "cpu", "torch": torch.__version__})


def slower(config: Config, rate: float) -> Config:
    """The recipe at a share of its rates, which are for larger batches."""
    optim, sparse = (replace(part, lr=rate * part.lr) for part in (config.optim, config.sparse))
    return replace(config, optim=optim, sparse=sparse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=23_040)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--rate", type=float, default=0.5, help="share of the recipe's rates")
    parser.add_argument("--rungs", nargs="*", default=TECHNIQUES, choices=TECHNIQUES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = slower(load_recipe(given.recipe), given.rate)
    config = replace(config, train=replace(config.train, dtype=given.dtype))
    run(config, torch.device(given.device), given.out, given.samples, given.batch, tuple(given.rungs))


if __name__ == "__main__":
    main()
