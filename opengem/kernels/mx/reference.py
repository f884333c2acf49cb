"""Bit-exact definition of block quantisation with E8M0 scales rounded up (RCEIL): no element ever saturates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opengem.kernels.mx.tensor import FORMATS, expand_scale

# largest finite values: 448 = 1.75 * 2 ** 8 and 57344 = 1.75 * 2 ** 15; both have the significand 1.75
MAX_EXPONENT = {"e4m3": 8, "e5m2": 15}
SIGNIFICAND_175 = 0x600000  # fraction bits of 1.75 in fp32


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, fp32 `[ceil(M / r), ceil(K / c)]`; a NaN in a block makes it NaN."""
    (rows, columns), (r, c) = x.shape, block
    padded = F.pad(x.abs(), (0, -columns % c, 0, -rows % r))
    return padded.unflatten(0, (-1, r)).unflatten(2, (-1, c)).amax((1, 3)).float()


def scale_from_amax(amax: Tensor, format: str) -> Tensor:
    """uint8 E8M0: the smallest power of two s with `amax / s <= largest finite value`; 255 (NaN) if amax is not finite.

    Read off the fp32 bits: exponent minus the format's, plus one if the significand exceeds 1.75. A block of zeros gets
    the smallest scale.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - MAX_EXPONENT[format] + ((bits & 0x7FFFFF) > SIGNIFICAND_175)
    return torch.where(amax.isfinite(), exponent.clamp(min=0), 255).to(torch.uint8)


def inverse_scale(scale: Tensor) -> Tensor:
    """fp32 `2 ** (127 - s)`, exactly; 1 where the scale is NaN."""
    exponent = torch.where(scale == 255, 127, 254 - scale.to(torch.int32))
    return (exponent << 23).view(torch.float32)


def quantize(x: Tensor, block: tuple[int, int], format: str) -> tuple[Tensor, Tensor]:
    """(data float8 `[M, K]`, scale uint8 per block), elements rounded to nearest even."""
    if x.numel() == 0:
        blocks = -(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])
        return x.to(FORMATS[format]), torch.zeros(blocks, dtype=torch.uint8, device=x.device)
    scale = scale_from_amax(block_amax(x, block), format)
    return (x.float() * expand_scale(inverse_scale(scale), x.shape, block)).to(FORMATS[format]), scale
