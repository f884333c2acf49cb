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


def bits(key: int | Tensor, element: Tensor) -> Tensor:
    """Uniform 32-bit numbers in an int64 tensor; `element` int64, any shape, >= 0. Two rounds of a 32-bit finaliser."""
    return _mix((element & _LOW) ^ _mix((element >> 32) ^ key) & _LOW)


def _mix(x: int | Tensor) -> int | Tensor:
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

    noise: int64 of x's shape, uniform 32-bit numbers, of which the top bits are used. float16 saturates at its largest
    finite value. float32 is returned as it is.
    """
    if dtype == torch.float32:
        return x
    dropped = 16 if dtype == torch.bfloat16 else 13
    draw, keep = (noise >> (32 - dropped)).int(), -(1 << dropped)
    if dtype == torch.bfloat16:
        return ((x.view(torch.int32) + draw) & keep).view(torch.float32).to(dtype)
    size = x.abs()
    lift = torch.where(size < 2**-14, 2**-14, 0.0)  # below 2^-14 float16 has fixed steps of 2^-24
    raised = (((size + lift).view(torch.int32) + draw) & keep).view(torch.float32) - lift
    return torch.where(raised > 65504.0, 65504.0, raised).copysign(x).to(dtype)


@dataclass(frozen=True)
class Rounding:
    """The noise of stochastic rounding for a matrix that holds runs of the rows of all tables.

    starts: int64 `[P]`, first row of each run in the matrix, ascending. shifts: add to a row of the matrix to get its
    number among the rows of all tables. The noise of an element so depends on (row of all tables, column, step) alone.
    """

    starts: Tensor
    shifts: Tensor

    @classmethod
    def of(cls, runs: list[tuple[int, int]], device: torch.device | str) -> Rounding:
        """From (number of its first row among the rows of all tables, first row in the matrix) of each run, in order
        of the matrix. Runs that go on where the one before ended are one."""
        columns: list[tuple[int, int]] = []
        for number, at in runs or [(0, 0)]:
            if not columns or columns[-1][1] != number - at:
                columns.append((at, number - at))
        return cls(*torch.tensor(columns, device=device).T.contiguous())

    def at_step(self, step: int) -> tuple[Tensor, Tensor, int]:
        """(starts, shifts, 31-bit key of that step)."""
        return self.starts, self.shifts, _mix(key("round") ^ (step & _LOW)) >> 1

    def __call__(self, values: Tensor, rows: Tensor, dtype: torch.dtype, step: int, first_column: int = 0) -> Tensor:
        """float32 `values` `[N, D]`, columns from `first_column` on, of rows int64 `[N]` of the matrix, in `dtype`."""
        if dtype == torch.float32:
            return values
        starts, shifts, step_key = self.at_step(step)
        drawn = bits(step_key, rows + shifts[torch.searchsorted(starts, rows, right=True) - 1])
        columns = torch.arange(first_column, first_column + values.shape[1], device=rows.device) * 0x9E3779B9
        x = (drawn[:, None] + columns) & _LOW
        return stochastic_round(values, dtype, (x ^ (x >> 16)) * 0x7FEB352D & _LOW)
