"""opengem bench kernels with shorter warm-up: python scratch/fast_bench.py OPS OUT [WARM]; WARM runs every function once."""
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from benchmarks import run
from benchmarks.registry import cases

if len(sys.argv) > 3:
    part, parts = map(int, sys.argv[3].split("/"))
    todo = [c for op in sys.argv[1].split("+") for c in cases(op.partition(":")[0]) if ":" not in op or c.name in op.partition(":")[2].split(",")][part::parts]
    for case in todo:
        inputs = case.make(torch.device("cuda"), 0)
        for name, f in {"opengem": case.ours, **case.peers}.items():
            try:
                out = f(*inputs)
                leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
                if leaves and case.bwd_bytes + case.bwd_flops:
                    torch.autograd.grad(out, leaves, torch.randn_like(out))
                with torch.no_grad(): f(*inputs)
                torch.cuda.synchronize(); print(case.name, name, "ok", flush=True)
            except Exception as e: print(case.name, name, repr(e)[:200], flush=True)
        del inputs; torch.cuda.empty_cache()
else:
    run.WARMUP_S, run.TARGET_S, run.MAX_RUNS = 0.05, 0.08, 24
    facts = run.environment(torch.device("cuda")) | run.ceilings(torch.device("cuda"))
    run.environment, run.ceilings = (lambda d: {}), (lambda d: facts)
    for op in sys.argv[1].split("+"):
        op, _, only = op.partition(":")
        run.kernels(op, Path(sys.argv[2]), True, tuple(only.split(",")) if only else ())
