"""GDPA with blocks that begin at different places of their lists of items: equal bits, and how fast?

    python benchmarks/ladder/gdpa_mixed.py compile I        kernels of one setting, on small batches
    python benchmarks/ladder/gdpa_mixed.py time OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import run
from benchmarks.kernels import gdpa as bench
from opengem.kernels.gdpa import gdpa, gdpa_schedule, launch

DEVICE = "cuda"
SETTINGS = {"zigzag": [0, 0, 0, 0], "around": [1, 0, 1, 0], "reversed": [2, 0, 2, 0],
            "around early": [1, 0, 1, 1]}
SHAPES = [  # queries, keys, fill
    (256, 256, 0.5), (256, 256, 1.0), (256, 0, 0.5), (512, 0, 0.5), (1024, 0, 0.5), (2048, 0, 0.5)]  # keys 0: cross, 256 keys


def case(shape: tuple, batch: int = 1152):
    q, k, fill = shape
    return bench._attention("", batch, q, k or 256, fill, cross=k == 0)


def both(found, inputs):
    q, k, v, *_ = inputs
    out = found.ours(*inputs)
    grad = torch.ones_like(out)
    return out, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def compile_part(part: int) -> None:
    todo = [(shape, name) for shape in SHAPES for name in SETTINGS if shape in (SHAPES[0], SHAPES[3])]
    for shape, name in todo[part::6]:
        launch.MIXED[:] = SETTINGS[name]
        found = case(shape, 8)
        out, backward = both(found, found.make(torch.device(DEVICE), 0))
        backward()
    torch.cuda.synchronize()


def time_all(out: Path) -> None:
    run.WARMUP_S, run.TARGET_S = 0.06, 0.1
    facts = run.ceilings(torch.device(DEVICE))
    for turn in range(2):
        for shape in SHAPES:
            found = case(shape)
            inputs = found.make(torch.device(DEVICE), 0)
            want = None
            for name in SETTINGS:
                launch.MIXED[:] = SETTINGS[name]
                y, backward = both(found, inputs)
                got = (y, *backward())
                equal = want is None or all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
                want = got
                with torch.no_grad():
                    fwd, spread = run.timed(lambda: found.ours(*inputs))
                    q, k, v, qo, ko = inputs
                    made = gdpa_schedule(q, k, qo, ko, max_q=shape[0])
                    given = run.timed(lambda: gdpa(*inputs, max_q=shape[0], max_kv=256, activation="gelu_tanh",
                                                   scale=bench.SCALE, schedule=made))[0]
                bwd = run.timed(backward)[0]
                row = {"turn": turn, "shape": shape, "name": name, "equal": equal, "fwd_ms": round(fwd, 4),
                       "spread": round(spread, 3), "fwd_tflops": round(found.fwd_flops / fwd / 1e9),
                       "given_ms": round(given, 4), "fwd_share": round(found.fwd_bytes / fwd / 1e6 / facts["copy_gbs"], 3)}
                row |= {"bwd_ms": round(bwd, 4), "bwd_tflops": round(found.bwd_flops / bwd / 1e9),
                        "bwd_share": round(found.bwd_bytes / bwd / 1e6 / facts["copy_gbs"], 3)}
                with open(out, "a") as file:
                    file.write(json.dumps(row | facts) + "\n")
                print(json.dumps(row), flush=True)
            del inputs, want, got, y, backward
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_part(int(sys.argv[2]))
    else:
        time_all(Path(sys.argv[2]))
