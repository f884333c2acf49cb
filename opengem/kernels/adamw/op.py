"""What a training step does to many numbers at once, by a kernel where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels import backend


def in_one_launch(device: torch.device) -> bool:
    """Whether there is a kernel for this device."""
    return backend.implementation("adamw", device) == "triton"


def clear(x: Tensor, flag: Tensor) -> None:
    """Zeros in place of contiguous x where `flag` (fp32, 0-dim, on the same device) is not 0; no host sync."""
    if not in_one_launch(x.device):
        x.masked_fill_(flag != 0, 0)
        return
    from opengem.kernels.adamw import triton

    triton.clear(x, flag)
