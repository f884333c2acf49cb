"""Definition of rotary position embedding on jagged rows, in plain PyTorch. The fast version is `triton.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels.jagged_ops.reference import rows_to_samples


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of the last dimension of `x` `[..., D]` by angles given as `cos`, `sin` `[..., D/2]`.

    Pair i is (i, i + D/2), or (2i, 2i + 1) if `interleaved`. Computed in the wider of the dtypes and kept there.
    """
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, -1)
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def rope(x: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """`x` `[T, H, D]` rotated by the angle of each row's position in its sample; by minus that angle if `inverse`."""
    rows = x.shape[0]
    if rows == 0 or offsets.shape[0] == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    sample = rows_to_samples(offsets, rows)
    position = torch.arange(rows, device=x.device) - offsets[sample]
    wide = torch.promote_types(x.dtype, torch.float32)
    row_cos, row_sin = cos.to(wide)[position, None], sin.to(wide)[position, None]
    return rotate(x.to(wide), row_cos, -row_sin if inverse else row_sin, interleaved).to(x.dtype)
