"""Does training see which implementation of GDPA runs? The small recipe on synthetic data, everything else equal.

    python -m benchmarks.ladder.gdpa_training --out FILE.jsonl [--seeds 0 1 2] [--steps 200] [--batch-size 512]

For each seed three runs from the same weights and batches: `kernel`, `reference` (GDPA alone), and `rounding`: the
reference with every output moved by up to one bf16 spacing at random, as another order of its sums would do. Rows give
the distance of the loss curves from `reference`; `kernel` should be no further than `rounding`. Runs are processes side
by side; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
KINDS = ("reference", "rounding", "kernel")


def curve(kind: str, seed: int, steps: int, batch_size: int, data: Path, recipe: str) -> list[float]:
    """The loss of every step."""
    from opengem.cli import load_recipe
    from opengem.kernels.gdpa import op, reference
    from opengem.train import train

    if kind != "kernel":
        op._implementation = lambda *_, **__: "reference"
    if kind == "rounding":
        exact, generators = reference.forward, {}
        reference.forward = lambda *arguments: shaken(exact(*arguments), generators)
    config = load_recipe(recipe)
    config = replace(config, data=replace(config.data, batch_size=batch_size, eval_splits=()),
                     train=replace(config.train, seed=seed, steps=steps, log_every=1, save_every=0, progress=False))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(config, data, run, with_baselines=False)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def shaken(x, generators: dict):
    """x, each element moved by up to one bf16 spacing; the random numbers of training stay as they are."""
    import torch

    generator = generators.setdefault(x.device, torch.Generator(x.device))
    return (x.float() * (1 + 2.0**-8 * (2 * torch.rand(x.shape, device=x.device, generator=generator) - 1))).to(x.dtype)


def compare(curves: dict[tuple[str, int], list[float]], seeds: list[int]) -> list[dict]:
    rows = []
    for seed in seeds:
        base = curves["reference", seed]
        for kind in KINDS[1:]:
            gaps = [abs(a - b) for a, b in zip(curves[kind, seed], base, strict=True)]
            rows.append({"op": "gdpa_training", "seed": seed, "impl": kind, "steps": len(gaps), "max_gap": max(gaps),
                         "mean_gap": sum(gaps) / len(gaps), "last_gap": gaps[-1], "mean_loss": sum(base) / len(base)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    shape = options.steps, options.batch_size
    if options.child:
        kind, seed = options.child
        options.out.write_text(json.dumps(curve(kind, int(seed), *shape, options.data, options.recipe)))
        return 0
    from opengem.data.synthetic import build

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        build(data, users=2000, samples=int(options.steps * options.batch_size * 1.3))
        children = {}
        for seed in options.seeds:
            for kind in KINDS:
                file = Path(folder) / f"{kind}{seed}.json"
                command = [sys.executable, __file__, "--out", str(file), "--data", str(data), "--child", kind,
                           str(seed), "--steps", str(shape[0]), "--batch-size", str(shape[1]),
                           "--recipe", options.recipe]
                children[kind, seed] = subprocess.Popen(command), file
        failed = [key for key, (child, _) in children.items() if child.wait()]
        if failed:
            print(f"failed: {failed}")
            return 1
        curves = {key: json.loads(file.read_text()) for key, (_, file) in children.items()}
    with open(options.out, "a") as file:
        for row in compare(curves, options.seeds):
            print(row)
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
