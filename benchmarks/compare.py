"""Compare two files of results: `python -m benchmarks.compare OLD.jsonl NEW.jsonl`.

A change smaller than the two spreads together is printed as noise. Rows that are errors in either file are listed, and
no speed-up is claimed for an op that has one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def load(path: Path) -> dict[tuple, dict]:
    """(op, case, impl) -> the newest row."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {(row["op"], row["case"], row["impl"]): row for row in rows}


def compare(old: dict[tuple, dict], new: dict[tuple, dict]) -> list[str]:
    """One line per row both files hold."""
    broken = {key[0] for rows in (old, new) for key, row in rows.items() if "error" in row and key[2] == "opengem"}
    lines = [f"{op}: has an error row, no speed-up is claimed" for op in sorted(broken)]
    for key in sorted(old.keys() & new.keys()):
        before, after = old[key], new[key]
        if key[0] in broken or "error" in before or "error" in after:
            continue
        for part, spread in (("fwd", "spread"), ("bwd", "bwd_spread")):
            if before[f"{part}_ms"] is None or after[f"{part}_ms"] is None:
                continue
            ratio = before[f"{part}_ms"] / after[f"{part}_ms"]
            noise = (before[spread] or 0) + (after[spread] or 0)
            verdict = "noise" if abs(ratio - 1) <= noise else "faster" if ratio > 1 else "SLOWER"
            lines.append(f"{'/'.join(key):<70}{part} x{ratio:.3f} {verdict}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.compare OLD.jsonl NEW.jsonl")
    print("\n".join(compare(load(Path(sys.argv[1])), load(Path(sys.argv[2])))))
