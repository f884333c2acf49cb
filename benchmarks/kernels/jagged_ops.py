"""Jagged copies, the per-sample broadcast sum and the jagged product against torch.compile of the reference.

Bytes as in `opengem.kernels.jagged_ops.cost`; padding cells count where they have to be written.
"""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.kernels.block import lengths, with_offsets
from benchmarks.registry import Case
from opengem.kernels.jagged_ops import cost, op, reference

SAMPLES, LONGEST, FILL, WIDTH = 1152, 2048, 0.3, 512
ROW = 2 * WIDTH


@cache
def compiled(function):
    return torch.compile(function, dynamic=False)


def sizes(seed: int = 0):
    return lengths(SAMPLES, LONGEST, FILL, seed)


def randn(*shape, device):
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def make_values(device, seed):
    torch.manual_seed(seed)
    return randn(int(sizes().sum()), WIDTH, device=device), with_offsets(sizes()).to(device)


def make_padded(device, seed):
    torch.manual_seed(seed)
    return randn(SAMPLES, LONGEST, WIDTH, device=device), with_offsets(sizes()).to(device)


def make_two(device, seed):
    torch.manual_seed(seed)
    starts = [with_offsets(s).to(device) for s in (sizes(0), sizes(1))]
    return *(randn(int(sizes(i).sum()), WIDTH, device=device) for i in (0, 1)), *starts


def make_gather(device, seed):
    torch.manual_seed(seed)
    rows = int(sizes().sum())
    return randn(rows, WIDTH, device=device), torch.randperm(rows, device=device)


def make_broadcast(device, seed):
    return *make_values(device, seed), randn(SAMPLES, WIDTH, device=device)


def make_product(device, seed):
    return *make_values(device, seed), randn(SAMPLES, WIDTH, 128, device=device)


def cases() -> list[Case]:
    rows, both = int(sizes().sum()), int(sizes().sum() + sizes(1).sum())
    pad, unpad = cost.pad_bytes(rows, SAMPLES, LONGEST, ROW), cost.unpad_bytes(rows, ROW)
    joined, product = cost.unpad_bytes(both, ROW), cost.bmm_flops(rows, WIDTH, 128)
    added = cost.broadcast_add_bytes(rows, SAMPLES, ROW)
    shape = {"B": SAMPLES, "T": rows, "max": LONGEST, "width": WIDTH}
    return [
        Case("jagged", "to_padded", shape, make_values, lambda x, o: op.jagged_to_padded(x, o, LONGEST),
             fwd_bytes=pad, bwd_bytes=unpad,
             peers={"torch_compile": lambda x, o: compiled(reference.jagged_to_padded)(x, o, LONGEST, 0.0)}),
        Case("jagged", "to_jagged", shape, make_padded, lambda p, o: op.padded_to_jagged(p, o, rows),
             fwd_bytes=unpad, bwd_bytes=pad,
             peers={"torch_compile": lambda p, o: compiled(reference.padded_to_jagged)(p, o, rows)}),
        Case("jagged", "concat", shape, make_two, lambda a, b, ao, bo: op.concat_jagged(a, b, ao, bo)[0],
             fwd_bytes=joined, bwd_bytes=joined,
             peers={"torch_compile": lambda a, b, ao, bo: compiled(reference.concat_jagged)(a, b, ao, bo)}),
        Case("jagged", "gather", shape, make_gather, op.gather_rows, fwd_bytes=unpad, bwd_bytes=unpad,
             peers={"torch_compile": lambda x, i: compiled(reference.gather_rows)(x, i)}),
        Case("jagged", "broadcast_add", shape, make_broadcast, lambda x, o, d: op.broadcast_add(x, d, o),
             fwd_bytes=added, bwd_bytes=cost.segment_sum_bytes(rows, SAMPLES, ROW),
             peers={"torch_compile": lambda x, o, d: compiled(reference.broadcast_add)(x, d, o)}),
        Case("jagged", "dense_bmm", shape | {"N": 128}, make_product,
             lambda x, o, w: op.jagged_dense_bmm(x, w, o, max_length=LONGEST), fwd_flops=product, bwd_flops=2 * product,
             fwd_bytes=rows * (ROW + 256) + SAMPLES * ROW * 128,
             bwd_bytes=2 * rows * ROW + rows * 256 + 2 * SAMPLES * ROW * 128,
             peers={"torch_padded_bmm": lambda x, o, w: reference.jagged_dense_bmm(x, w, o, LONGEST)}),
    ]
