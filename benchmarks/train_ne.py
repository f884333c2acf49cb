"""NE of every rung of the training ladder on one stream, from the same parameters: equal, as far as rounding goes.

    python -m benchmarks.train_ne --recipe tiny --device cpu --dtype bfloat16 --out FILE.jsonl

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


def run(config: Config, device: torch.device, out: Path | None, samples: int, size: int,
        rungs: tuple[str, ...]) -> list[dict]:
    """One row a rung: `ne` in the order of the data, `ne_orders` in both. size: samples of a batch."""
    known, rows = [rung.technique for rung in train.LADDER], []
    facts = environment(device) if device.type == "cuda" else {"gpu": "cpu", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthetic.build(data, **train.STREAM)
        for rung in rungs or known:
            found = []
            for order in range(2):
                with train.only(tuple(known[: known.index(rung) + 1])):
                    job = train.job_of(config, data, device, compiled=rung == "baseline")
                    found.append(train.quality(job, data, samples, size, order)["ne"])
                    del job
            row = {"op": "train", "case": f"{config.name}_ladder_ne", "impl": rung, "peer": None, "ne": found[0],
                   "ne_orders": found, "ne_samples": samples, "ne_batch": size, "dtype": config.train.dtype} | facts
            rows.append(row)
            record(row, f"{rung:<10} NE {'  '.join(f'{ne:.5f}' for ne in found)}", out)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=6144)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rungs", nargs="*", default=())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = load_recipe(given.recipe)
    config = replace(config, train=replace(config.train, dtype=given.dtype))
    run(config, torch.device(given.device), given.out, given.samples, given.batch, tuple(given.rungs))


if __name__ == "__main__":
    main()
