"""Jagged copies, the per-sample broadcast sum and the jagged product against torch.compile of the same function.

Bytes as in `opengem.kernels.jagged_ops.cost`; padding cells count where they have to be written. Peers get the sample
and place of each row, made outside of their time (torch.compile of a search for them gives wrong rows).
`torch_grouped_mm` is the grouped product of the library, which takes fewer than 1,024 groups: the batch in two halves,
joined.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.block import lengths, row_positions, with_offsets
from benchmarks.registry import Case, compiled
from opengem.kernels.jagged_ops import cost, op, reference

SAMPLES, LONGEST, FILL, WIDTH = 1152, 2048, 0.3, 512
ROW = 2 * WIDTH


def sizes(seed: int = 0):
    return lengths(SAMPLES, LONGEST, FILL, seed)


def randn(*shape, device):
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def places(device):
    """offsets, sample of each row, its place in the sample."""
    sample = torch.arange(SAMPLES).repeat_interleave(sizes())
    return with_offsets(sizes()).to(device), sample.to(device), row_positions(sizes()).to(device)


def make_values(device, seed):
    torch.manual_seed(seed)
    return randn(int(sizes().sum()), WIDTH, device=device), *places(device)


def make_padded(device, seed):
    torch.manual_seed(seed)
    return randn(SAMPLES, LONGEST, WIDTH, device=device), *places(device)


def make_two(device, seed):
    """Left and right rows, their offsets, and for each row of the result: is it from the left, its row on each side."""
    torch.manual_seed(seed)
    left, right = (with_offsets(s) for s in (sizes(0), sizes(1)))
    both, row = left + right, torch.arange(int(left[-1] + right[-1]))
    sample = torch.arange(SAMPLES).repeat_interleave(both.diff())
    from_left, from_right = row - right[sample], row - left[sample + 1]
    places = from_left < left[sample + 1], from_left.clamp(max=left[-1] - 1), from_right.clamp(0, right[-1] - 1)
    parts = (randn(int(s[-1]), WIDTH, device=device) for s in (left, right))
    return *parts, *(x.to(device) for x in (left, right, *places))


def make_gather(device, seed):
    torch.manual_seed(seed)
    rows = int(sizes().sum())
    return randn(rows, WIDTH, device=device), torch.randperm(rows, device=device)


def make_broadcast(device, seed):
    return *make_values(device, seed), randn(SAMPLES, WIDTH, device=device)


def make_product(device, seed):
    return *make_values(device, seed), randn(SAMPLES, WIDTH, 128, device=device)


def torch_to_jagged(padded, sample, place):
    return padded[sample, place]


def torch_concat(left, right, takes_left, from_left, from_right):
    return torch.where(takes_left[:, None], left[from_left], right[from_right])


def torch_broadcast_add(x, sample, dense):
    return (x.float() + dense[sample].float()).to(x.dtype)


def padded_product(x, o, sample, place, w):
    padded = reference.jagged_to_padded(x, o, LONGEST, 0.0)
    return torch_to_jagged(torch.bmm(padded, w), sample, place)


def grouped_product(x, o, w, middle, row):
    ends = o.int()
    parts = (x[:row], w[:middle], ends[1 : middle + 1]), (x[row:], w[middle:], ends[middle + 1 :] - ends[middle])
    return torch.cat([torch._grouped_mm(rows, dense, offs=part) for rows, dense, part in parts])


def cases() -> list[Case]:
    rows, both = int(sizes().sum()), int(sizes().sum() + sizes(1).sum())
    pad, unpad = cost.pad_bytes(rows, SAMPLES, LONGEST, ROW), cost.unpad_bytes(rows, ROW)
    joined, product = cost.unpad_bytes(both, ROW), cost.bmm_flops(rows, WIDTH, 128)
    added = cost.broadcast_add_bytes(rows, SAMPLES, ROW)
    shape = {"B": SAMPLES, "T": rows, "max": LONGEST, "width": WIDTH}
    middle = SAMPLES // 2
    row = int(sizes()[:middle].sum())
    return [
        Case("jagged", "to_padded", shape, make_values, lambda x, o, *_: op.jagged_to_padded(x, o, LONGEST),
             fwd_bytes=pad, bwd_bytes=unpad, counted="bytes (T + B max) row; backward 2 T row",
             peers={"torch_compile": lambda x, o, *_: compiled(reference.jagged_to_padded)(x, o, LONGEST, 0.0)}),
        Case("jagged", "to_jagged", shape, make_padded, lambda p, o, *_: op.padded_to_jagged(p, o, rows),
             fwd_bytes=unpad, bwd_bytes=pad, counted="bytes 2 T row; backward (T + B max) row",
             peers={"torch_compile": lambda p, o, *at: compiled(torch_to_jagged)(p, *at)}),
        Case("jagged", "concat", shape, make_two, lambda a, b, ao, bo, *_: op.concat_jagged(a, b, ao, bo)[0],
             fwd_bytes=joined, bwd_bytes=joined, counted="bytes 2 (Tl + Tr) row; the backward is the split",
             peers={"torch_compile": lambda a, b, ao, bo, *at: compiled(torch_concat)(a, b, *at)}),
        Case("jagged", "gather", shape, make_gather, op.gather_rows, fwd_bytes=unpad, bwd_bytes=unpad,
             counted="bytes 2 T row; backward the same, grouping the uses of a row inside its time",
             peers={"torch_compile": lambda x, i: compiled(reference.gather_rows)(x, i)}),
        Case("jagged", "broadcast_add", shape, make_broadcast, lambda x, o, sample, place, d: op.broadcast_add(x, d, o),
             fwd_bytes=added, bwd_bytes=cost.segment_sum_bytes(rows, SAMPLES, ROW),
             counted="bytes (2 T + B) row; backward (T + B) row",
             peers={"torch_compile": lambda x, o, sample, place, d: compiled(torch_broadcast_add)(x, sample, d)}),
        Case("jagged", "dense_bmm", shape | {"N": 128}, make_product,
             lambda x, o, sample, place, w: op.jagged_dense_bmm(x, w, o, max_length=LONGEST),
             fwd_flops=product, bwd_flops=2 * product,
             fwd_bytes=cost.bmm_bytes(rows, SAMPLES, WIDTH, 128, 2),
             bwd_bytes=cost.bmm_backward_bytes(rows, SAMPLES, WIDTH, 128, 2),
             counted="bytes 2 (T (K + N) + B K N); backward 2 (T (2 K + N) + 2 B K N)",
             peers={"torch_compile": lambda *inputs: compiled(padded_product)(*inputs),
                    "torch_grouped_mm": lambda x, o, sample, place, w: grouped_product(x, o, w, middle, row)}),
    ]
