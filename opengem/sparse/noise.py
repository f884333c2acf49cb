"""Counter-based random numbers: the same bits for the same (key, element) on every device, rank and world size.

A table's initial rows and the noise of stochastic rounding are pure functions of who asks (`key`: parameter, seed,
step) and where (`element`: row * dim + column in the whole table). So a shard draws exactly what the whole table would,
replicas agree, and a resumed run repeats itself.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # elements drawn at a time: the int64 temporaries stay in cache, or small


def key(*parts: str | int) -> int:
    """An unsigned 32-bit key of a few names and numbers (crc32 of their text, so equal in every process)."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def step_keys(keys: Tensor, step: int) -> Tensor:
    """Keys (int64 tensor) of one step from keys of parameters."""
    return _mix(keys ^ (step & _LOW))


def bits(key: int | Tensor, element: Tensor) -> Tensor:
    """Uniform 32-bit numbers in an int64 tensor; `element` int64, any shape, >= 0. Two rounds of a 32-bit finaliser."""
    return _mix((element & _LOW) ^ _mix((element >> 32) ^ key) & _LOW)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


def fill_normal(out: Tensor, key: int, first_row: int, std: float) -> None:
    """Fill `out` `[rows, dim]` with N(0, std²): row i gets what row `first_row + i` of the whole table gets."""
    flat, start, chunk = out.view(-1), first_row * out.shape[1], _CHUNK[out.device.type]
    for begin in range(0, flat.shape[0], chunk):
        part = flat[begin : begin + chunk]
        element = torch.arange(start + begin, start + begin + part.shape[0], device=out.device)
        radius = ((bits(key, 2 * element) + 0.5) / 2**32).log().mul(-2).sqrt()
        angle = bits(key, 2 * element + 1) * (2 * math.pi / 2**32)
        part.copy_(radius * angle.cos() * std)


def stochastic_round(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round float32 `x` to bfloat16 or float16, up or down with the probability that makes the mean exact.

    noise: int64 of x's shape, uniform 32-bit numbers (`bits`). float16 saturates at its largest finite value.
    float32 is returned as it is.
    """
    if dtype == torch.float32:
        return x
    dropped = 16 if dtype == torch.bfloat16 else 13
    limit = torch.finfo(dtype).max
    raised = (x.view(torch.int32) + (noise & ((1 << dropped) - 1)).int()) & -(1 << dropped)
    rounded = torch.where(x.isfinite(), raised.view(torch.float32), x)
    if dtype == torch.float16:
        # Below 2^-14 float16 has fixed steps of 2^-24.
        steps = (x.abs() * 2**24 + (noise & 0x1FFF) / 2**13).floor() * 2**-24
        rounded = torch.where(x.abs() < 2**-14, steps.copysign(x), rounded).clamp(-limit, limit)
    return rounded.to(dtype)


@dataclass(frozen=True)
class Rounding:
    """The noise of stochastic rounding for a matrix that holds runs of several tables.

    starts: int64 `[P]`, first row of each run in the matrix, ascending. shifts: add to a row of the matrix to get the
    row of the whole table. keys: of the table. The noise of an element so depends on (table, step, element) alone.
    """

    starts: Tensor
    shifts: Tensor
    keys: Tensor

    @classmethod
    def of(cls, runs: list[tuple[str, int, int]], device: torch.device | str) -> Rounding:
        """From (table, first row in the table, first row in the matrix) of each run, in order of the matrix."""
        columns = [(at, first - at, key("round", table)) for table, first, at in runs] or [(0, 0, 0)]
        return cls(*torch.tensor(columns, device=device).T.contiguous())

    def at_step(self, step: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """(starts, shifts, keys of that step); None where no number will be drawn."""
        return self.starts, self.shifts, self.keys if step is None else step_keys(self.keys, step)

    def __call__(self, values: Tensor, rows: Tensor, dtype: torch.dtype, step: int) -> Tensor:
        """float32 `values` `[N, D]` of rows int64 `[N]` of the matrix, in `dtype`."""
        if dtype == torch.float32:
            return values
        run = torch.searchsorted(self.starts, rows, right=True) - 1
        columns = torch.arange(values.shape[1], device=rows.device)
        element = (rows + self.shifts[run])[:, None] * values.shape[1] + columns
        keys = step_keys(self.keys, step)[run]
        return stochastic_round(values, dtype, bits(keys[:, None], element))
