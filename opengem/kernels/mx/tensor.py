"""`MXTensor`: a matrix in 8-bit floats with one power-of-two scale per block, and what turns it back.

OCP Microscaling Formats (MX) v1.0 for elements and E8M0 scales. A square block serves a matrix and its transpose alike,
so one quantised copy feeds the forward, data-gradient and weight-gradient products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, eq=False)
class MXTensor:
    """`[M, K]` elements with a scale per block.

    data: float8 `[M, K]`. scale: uint8 `[ceil(M / block[0]), ceil(K / block[1])]`, E8M0: the value is `2 ** (s - 127)`,
    255 is NaN. Edge blocks may be short. dtype: what `dequantize` returns. anchor: None, or a tensor of `data`'s shape
    and `dtype` that takes no memory and whose gradient is the gradient of the dequantised values (straight through),
    so that a consumer with its own backward can hand it to whoever made this tensor.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: torch.dtype
    anchor: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self) -> Tensor:
        """`[M, K]` in `dtype`; gradients reach `anchor` unchanged."""
        exact = self.data.float() * expand_scale(scale_to_float(self.scale), self.data.shape, self.block)
        out = exact.to(self.dtype)
        return out if self.anchor is None else _StraightThrough.apply(out, self.anchor)

    def t(self) -> MXTensor:
        """The transpose `[K, M]`: the same bytes with the scales transposed."""
        anchor = None if self.anchor is None else self.anchor.t()
        return MXTensor(self.data.t(), self.scale.t(), self.block[::-1], self.dtype, anchor)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, anchor):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def scale_to_float(scale: Tensor) -> Tensor:
    """fp32 value of E8M0 bytes, exactly: `2 ** (s - 127)`, NaN for 255."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 1 << 22, bits)  # 2 ** -127 is subnormal in fp32
    return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)


def expand_scale(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """One entry per element: `[M, K]` from one entry per block."""
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]
