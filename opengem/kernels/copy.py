"""Copies between tensors of different strides."""

from __future__ import annotations

import torch
from torch import Tensor


def put(into: Tensor, x: Tensor) -> None:
    """`into.copy_(x)` of one dtype and shape, 16 bytes at a time where both allow it: PyTorch copies between different
    strides element by element."""
    if not torch.compiler.is_compiling() and _wide(into) and _wide(x):
        into, x = into.view(torch.complex128), x.view(torch.complex128)
    into.copy_(x)


def _wide(x: Tensor) -> bool:
    """Whether the last dimension is made of runs of 16 bytes that start at multiples of 16."""
    pieces = 16 // x.element_size()
    return x.stride(-1) == 1 and not any(n % pieces for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
