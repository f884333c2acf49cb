"""Rotary embedding of a long-history batch in both pairings against torch.compile. Bytes: one read, one write.

The peer gets the position of every row, made outside of its time (torch.compile of a search for it gives wrong rows).
"""

from __future__ import annotations

import torch

from benchmarks.kernels.block import HEADS, LONGEST, lengths, row_positions, with_offsets
from benchmarks.registry import Case, compiled
from opengem.kernels.rope import cost, reference
from opengem.kernels.rope.op import apply_rope, rope_tables


def make(device: torch.device, seed: int, dim: int) -> tuple:
    """x, offsets, cos, sin, position of each row."""
    torch.manual_seed(seed)
    sizes = lengths()
    x = torch.randn(int(sizes.sum()), HEADS, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    return x, with_offsets(sizes).to(device), *rope_tables(LONGEST, dim, device=device), row_positions(sizes).to(device)


def torch_rope(x, cos, sin, position, interleaved):
    return reference.rotate(x.float(), cos[position].unsqueeze(1), sin[position].unsqueeze(1), interleaved).to(x.dtype)


def _case(dim: int, interleaved: bool) -> Case:
    rows, longest = int(lengths().sum()), int(lengths().max())
    moved = cost.bytes(rows, HEADS, dim, positions=longest)
    name = f"rope_{'interleaved' if interleaved else 'half'}_d{dim}"
    return Case(
        op="rope", name=name, shape={"T": rows, "H": HEADS, "D": dim}, fwd_bytes=moved, bwd_bytes=moved,
        make=lambda device, seed: make(device, seed, dim), counted="bytes 2 T H D item + fp32 tables once, both ways",
        ours=lambda x, offsets, cos, sin, position: apply_rope(
            x, offsets, cos, sin, interleaved=interleaved, max_length=LONGEST),
        peers={"torch_compile": lambda x, offsets, cos, sin, position: compiled(torch_rope)(
            x, cos, sin, position, interleaved)})


def cases() -> list[Case]:
    return [_case(dim, interleaved) for dim in (128, 64) for interleaved in (False, True)]
