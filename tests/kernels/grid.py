"""The shared grid of jagged edge cases: every op that takes offsets runs on all of it, forward and backward."""

from __future__ import annotations

import torch

# name -> (query lengths, key lengths); None for keys means the same as the queries
LENGTHS: dict[str, tuple[list[int], list[int] | None]] = {
    "empty_batch": ([], None),
    "all_empty": ([0, 0, 0], None),
    "one_token": ([1], None),
    "two_singles": ([1, 1], None),
    "zero_between": ([3, 0, 5, 0, 0, 2], None),
    "tile_edges_64": ([63, 64, 65], None),
    "tile_edges_128": ([127, 128, 129], None),
    "giant_among_tiny": ([1, 700, 0, 2, 1, 3], None),
    "unsorted": ([17, 111, 4, 64, 200, 1], None),
    "zero_q": ([0, 2, 1, 0], [3, 2, 1, 4]),
    "zero_kv": ([2, 2, 0, 1], [0, 2, 0, 0]),
    "both_zero": ([0, 4, 0], [0, 0, 5]),
    "long_q_short_kv": ([130, 7, 64], [5, 1, 16]),
    "short_q_long_kv": ([4, 4, 4, 4], [300, 0, 1, 65]),
    "seed_edge": ([0, 1], [0, 3]),
}


def offsets(lengths: list[int], device: str = "cpu", dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`[B + 1]`: 0 and the running sum of `lengths`."""
    total = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return total.to(device=device, dtype=dtype)


def case(name: str) -> tuple[list[int], list[int]]:
    """(query lengths, key lengths) of a case."""
    q, kv = LENGTHS[name]
    return q, q if kv is None else kv


def fused_views(
    total: int, heads: int, dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v `[total, heads, dim]` as strided views of one `[total, 3 * heads * dim]` buffer, random normal."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(total, 3 * heads * dim, generator=generator).to(device=device, dtype=dtype)
    return tuple(part.unflatten(1, (heads, dim)) for part in fused.chunk(3, dim=1))
