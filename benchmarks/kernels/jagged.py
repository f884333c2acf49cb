"""Jagged copies, the per-sample broadcast sum and the jagged product against torch.compile of the same function.

Bytes as in `opengem.kernels.jagged_ops.cost`; padding cells count where they have to be written. `torch_grouped_mm` is
the grouped product of the library, which takes fewer than 1,024 groups: the batch in two halves, joined.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.block import lengths, with_offsets
from benchmarks.registry import Case, compiled
from opengem.kernels.jagged_ops import cost, op, reference

SAMPLES, LONGEST, FILL, WIDTH = 1152, 2048, 0.3, 512
ROW = 2 * WIDTH


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


def torch_to_jagged(padded, offsets, rows):
    row = torch.arange(rows, device=padded.device)
    sample = torch.searchsorted(offsets[1:], row, right=True)
    return padded[sample, row - offsets[sample]]


def torch_concat(left, right, left_offsets, right_offsets):
    row = torch.arange(left.shape[0] + right.shape[0], device=left.device)
    sample = torch.searchsorted((left_offsets + right_offsets)[1:], row, right=True)
    from_left = row - right_offsets[sample]
    from_right = (row - left_offsets[sample + 1]).clamp(0, right.shape[0] - 1)
    takes_left = (from_left < left_offsets[sample + 1])[:, None]
    return torch.where(takes_left, left[from_left.clamp(max=left.shape[0] - 1)], right[from_right])


def padded_product(x, o, w, rows):
    padded = reference.jagged_to_padded(x, o, LONGEST, 0.0)
    return torch_to_jagged(torch.bmm(padded, w), o, rows)


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
        Case("jagged", "to_padded", shape, make_values, lambda x, o: op.jagged_to_padded(x, o, LONGEST),
             fwd_bytes=pad, bwd_bytes=unpad, counted="bytes (T + B max) row; backward 2 T row",
             peers={"torch_compile": lambda x, o: compiled(reference.jagged_to_padded)(x, o, LONGEST, 0.0)}),
        Case("jagged", "to_jagged", shape, make_padded, lambda p, o: op.padded_to_jagged(p, o, rows),
             fwd_bytes=unpad, bwd_bytes=pad, counted="bytes 2 T row; backward (T + B max) row",
             peers={"torch_compile": lambda p, o: compiled(torch_to_jagged)(p, o, rows)}),
        Case("jagged", "concat", shape, make_two, lambda a, b, ao, bo: op.concat_jagged(a, b, ao, bo)[0],
             fwd_bytes=joined, bwd_bytes=joined, counted="bytes 2 (Tl + Tr) row; the backward is the split",
             peers={"torch_compile": lambda a, b, ao, bo: compiled(torch_concat)(a, b, ao, bo)}),
        Case("jagged", "gather", shape, make_gather, op.gather_rows, fwd_bytes=unpad, bwd_bytes=unpad,
             counted="bytes 2 T row; backward the same, grouping the uses of a row inside its time",
             peers={"torch_compile": lambda x, i: compiled(reference.gather_rows)(x, i)}),
        Case("jagged", "broadcast_add", shape, make_broadcast, lambda x, o, d: op.broadcast_add(x, d, o),
             fwd_bytes=added, bwd_bytes=cost.segment_sum_bytes(rows, SAMPLES, ROW),
             counted="bytes (2 T + B) row; backward (T + B) row",
             peers={"torch_compile": lambda x, o, d: compiled(reference.broadcast_add)(x, d, o)}),
        Case("jagged", "dense_bmm", shape | {"N": 128}, make_product,
             lambda x, o, w: op.jagged_dense_bmm(x, w, o, max_length=LONGEST), fwd_flops=product, bwd_flops=2 * product,
             fwd_bytes=cost.bmm_bytes(rows, SAMPLES, WIDTH, 128, 2),
             bwd_bytes=cost.bmm_backward_bytes(rows, SAMPLES, WIDTH, 128, 2),
             counted="bytes 2 (T (K + N) + B K N); backward 2 (T (2 K + N) + 2 B K N)",
             peers={"torch_compile": lambda x, o, w: compiled(padded_product)(x, o, w, rows),
                    "torch_grouped_mm": lambda x, o, w: grouped_product(x, o, w, middle, row)}),
    ]
