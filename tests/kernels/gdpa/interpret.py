"""Runs the Triton kernels on the CPU through Triton's interpreter, in fp32, and compares with the naive loop.

A program of its own, because TRITON_INTERPRET has to be set before a kernel is defined. Exit status 1 on a difference.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys  # noqa: E402

import torch  # noqa: E402

from opengem.kernels import backend  # noqa: E402
from opengem.kernels.gdpa import gdpa, gdpa_schedule, launch  # noqa: E402
from opengem.kernels.gdpa.activations import ACTIVATIONS  # noqa: E402
from tests.kernels import grid  # noqa: E402
from tests.kernels.gdpa import naive  # noqa: E402


def compare(name, q_lengths, kv_lengths, *, seeds=0, dim=32, heads=2, activation="gelu", max_q=None, share=False):
    q, _, _ = grid.fused_views(seeds or sum(q_lengths), heads, dim, seed=1)
    _, k, v = grid.fused_views(sum(kv_lengths), heads, dim, seed=2)
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    q_lengths = [seeds] * len(kv_lengths) if seeds else q_lengths
    q_offsets = None if seeds else grid.offsets(q_lengths, dtype=torch.int32)
    kv_offsets = grid.offsets(kv_lengths)
    max_q = seeds or max_q or max(q_lengths, default=0)
    sizes = {"max_q": max_q, "shared_q": bool(seeds)}
    truth = naive.gdpa(*qkv, q_lengths, kv_lengths, activation, 0.4, bool(seeds))
    with backend.force("triton"):
        schedule = gdpa_schedule(*qkv[:2], q_offsets, kv_offsets, **sizes) if share else None
        out = gdpa(*qkv, q_offsets, kv_offsets, max_kv=max(kv_lengths, default=0), activation=activation, scale=0.4,
                   schedule=schedule, **sizes)
        grad = torch.randn_like(out)
        got = [out, *naive.gradients(out, qkv, grad)]
    wanted = [truth.float(), *naive.gradients(truth, qkv, grad)]
    for label, a, b in zip(["out", "dq", "dk", "dv"], got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4, msg=lambda m, n=f"{name} {label}": f"{n}: {m}")


def main() -> int:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    launch.CHUNK = 96  # several runs a sample, at lengths an interpreter can take
    for name in grid.LENGTHS:
        q_lengths, kv_lengths = grid.case(name)
        if max(q_lengths, default=0) <= launch.NARROW:
            compare(f"{name} narrow", q_lengths, kv_lengths)
        compare(f"{name} wide", q_lengths, kv_lengths, max_q=999, heads=1, share=True)
    for name in ("unsorted", "zero_kv", "short_q_long_kv", "empty_batch", "all_empty"):
        for seeds in (5, 70):
            compare(f"{name} {seeds} seeds", [], grid.case(name)[1], seeds=seeds, heads=1)
    for activation in ACTIVATIONS:
        compare(activation, [66], [70], activation=activation, heads=1)
        compare(f"{activation} narrow", [17], [70], activation=activation, heads=1)
    for dim in launch.HEAD_DIMS:
        compare(f"D={dim}", [66], [70], dim=dim, heads=1)
        compare(f"D={dim} narrow", [17], [70], dim=dim, heads=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
