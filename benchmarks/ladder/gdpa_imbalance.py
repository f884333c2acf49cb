"""How evenly tiles land on the multiprocessors: the padded grid against the dealt list (counted, no GPU needed).

    python -m benchmarks.ladder.gdpa_imbalance [--out FILE.jsonl] [--processors 132]

Work of a block is the number of pairs of tiles (128 queries by 128 keys) it walks. `padded`: ceil(max / 128) tiles
for every sample, in the order of the batch, block i to multiprocessor i mod P, as a persistent kernel over a
rectangular grid does. `chunks`: the same grid cut in P pieces of consecutive tiles. `listed`: only tiles that exist, in
the order of the batch, round robin. `dealt`: those tiles longest first and zigzag, as `deal_tiles` and the Hopper
kernels do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
TILE = 128


def loads(q: list[int], kv: list[int], heads: int, longest: int, processors: int, order: str) -> list[int]:
    """Pairs of tiles of each multiprocessor."""
    padded = order in ("padded", "chunks")
    work = []
    for queries, keys in zip(q, kv, strict=True):
        tiles = -(-queries // TILE)
        each = -(-keys // TILE)
        listed = -(-longest // TILE) if padded else tiles
        work += [each if t < tiles else 0 for t in range(listed) for _ in range(heads)]
    if order == "dealt":
        work.sort(reverse=True)
    total = [0] * processors
    for item, size in enumerate(work):
        turn, place = divmod(item, processors)
        if order == "chunks":
            place = item * processors // len(work)
        elif order == "dealt" and turn % 2:
            place = processors - 1 - place
        total[place] += size
    return total


def main() -> None:
    import torch

    from benchmarks.kernels.gdpa import HEADS, lengths

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processors", type=int, default=132)
    options = parser.parse_args()
    uniform = lengths(1152, 2048, 0.5)
    normal = torch.randn(1152, generator=torch.Generator().manual_seed(0))
    skewed = (normal * 1.0 + 5.5).exp().long().clamp(1, 2048).tolist()
    laws = {"uniform, fill .5": uniform, "log-normal (sigma 1, median 245)": skewed}
    for law, rows in laws.items():
        for batch in (1152, 32):
            for order in ("chunks", "padded", "listed", "dealt"):
                total = loads(rows[:: 1152 // batch], rows[:: 1152 // batch], HEADS, 2048, options.processors, order)
                row = {"op": "gdpa_imbalance", "lengths": law, "B": batch, "order": order,
                       "max_over_mean": max(total) * len(total) / sum(total),
                       "max_over_min": max(total) / max(min(total), 1)}
                print(row)
                if options.out:
                    with open(options.out, "a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
