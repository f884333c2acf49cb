"""The backward of few queries, over and over, beside other processes: equal bits and finite gradients each time.

    python -m benchmarks.ladder.jfa_stress [--processes 4] [--seconds 20] [--variant deadbarriers]

Each process draws its own lengths (0 to 1,024 keys for 64 queries, 192 samples), fills what is allocated with NaN, and
calls the pooling op and flash attention at head_dim 128. A GPU that several processes share swaps them in and out,
which brings to light what a process alone never shows. `--variant` takes the kernel of `jfa_variants` of that name.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from benchmarks.ladder.jfa_check import emit


def draw(seed: int) -> tuple:
    """(q, keys and values, offsets of both, gradient) for 5 heads, one of which counts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 1025, (192,), generator=generator)
    lengths[torch.rand(192, generator=generator) < 0.1] = 0
    on_gpu = torch.Generator("cuda").manual_seed(seed)
    rows, keys = 192 * 64, int(lengths.sum())
    q, kv, grad = (torch.randn(shape, generator=on_gpu, device="cuda", dtype=torch.bfloat16)
                   for shape in ((rows, 5, 64), (keys, 10, 64), (rows, 5, 64)))
    offsets = torch.arange(193, device="cuda", dtype=torch.int32) * 64
    return q, kv, offsets, torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32), grad


def pooled(q, kv, q_offsets, kv_offsets, grad) -> tuple:
    from opengem.kernels.pool.op import average_and_count

    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    out = average_and_count(q, kv, q_offsets, kv_offsets, max_q=64, max_kv=1024, counting=1)
    return out, *torch.autograd.grad(out, (q, kv), grad)


def attended(q, kv, q_offsets, kv_offsets, grad) -> tuple:
    from opengem.kernels import jagged_flash_attention

    q, kv = q[:, :4].reshape(-1, 2, 128).requires_grad_(), kv[:, :8].reshape(-1, 4, 128)
    k, v = (x.detach().requires_grad_() for x in kv.split(2, 1))
    out = jagged_flash_attention(q, k, v, q_offsets, kv_offsets, max_q=64, max_kv=1024)
    return out, *torch.autograd.grad(out, (q, k, v), grad[:, :4].reshape(-1, 2, 128))


def work(seed: int, seconds: float, variant: str | None) -> bool:
    from opengem.kernels.jfa import gluon_sm90_backward as package

    if variant:
        from benchmarks.ladder.jfa_variants import build

        package._backward_kernel = build(variant)._backward_kernel
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    inputs = draw(seed)
    firsts = {call: call(*inputs) for call in (pooled, attended)}
    torch.cuda.synchronize()
    end, calls, wrong, unfinished = time.time() + seconds, 0, 0, 0
    while time.time() < end:
        bad = torch.zeros(2, dtype=torch.int64, device="cuda")
        for call, first in firsts.items():
            for _ in range(20):
                for a, b in zip(call(*inputs), first, strict=True):
                    bad += torch.stack([(a != b).any(), ~a.isfinite().all()])
        found = bad.tolist()
        calls, wrong, unfinished = calls + 40, wrong + found[0], unfinished + found[1]
    emit(stress=variant or "package", seed=seed, calls=calls, tensors_that_differ=wrong, not_finite=unfinished,
         first_finite=all(bool(x.isfinite().all()) for first in firsts.values() for x in first))
    return wrong == unfinished == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--variant")
    parser.add_argument("--seed", type=int, help="for this command itself: be one of the processes")
    given = parser.parse_args()
    if given.seed is not None:
        return 0 if work(given.seed, given.seconds, given.variant) else 1
    command = [sys.executable, "-m", "benchmarks.ladder.jfa_stress", "--seconds", str(given.seconds)]
    command += ["--variant", given.variant] if given.variant else []
    workers = [subprocess.Popen([*command, "--seed", str(seed)]) for seed in range(given.processes)]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
