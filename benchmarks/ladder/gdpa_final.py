"""The cases of `opengem bench kernels --op gdpa` with short warm-ups: every case of ours, peers where they are quick.

    python -m benchmarks.ladder.gdpa_final --out FILE.jsonl [--peers CASE ...]

`torch_varlen_fa2` runs on every case, the compiled padded formula (minutes of compilation in all) only on CASEs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    import torch

    from benchmarks import run
    from benchmarks.kernels.gdpa import cases

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", default=["gdpa_self512_fill.5", "gdpa_cross1024x256_fill.5"])
    options = parser.parse_args()
    run.WARMUP_S, run.TARGET_S = 0.12, 0.15
    device = torch.device("cuda")
    facts = run.environment(device) | run.ceilings(device)
    for case in cases():
        names = {"torch_varlen_fa2", *(["padded_bmm_gelu_compiled"] if case.name in options.peers else [])}
        case = replace(case, peers={name: peer for name, peer in case.peers.items() if name in names})
        for row in run.run_case(case, device, True):
            run.record(row | facts, run.describe(row | facts), options.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
