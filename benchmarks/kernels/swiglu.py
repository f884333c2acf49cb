"""SwiGLU against torch.compile of the same formula. Bytes: forward three, backward five passes over `[M, F]`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.registry import Case, compiled
from opengem.kernels.swiglu import cost
from opengem.kernels.swiglu.op import swiglu

ELEMENTS = 1 << 28


def torch_swiglu(x):
    gate, up = x.float().chunk(2, 1)
    return (F.silu(gate) * up).to(x.dtype)


def _case(width: int) -> Case:
    rows = ELEMENTS // 2 // width

    def make(device: torch.device, seed: int) -> tuple:
        torch.manual_seed(seed)
        return (torch.randn(rows, 2 * width, device=device, dtype=torch.bfloat16).requires_grad_(),)

    return Case(
        op="swiglu", name=f"swiglu_{width}", shape={"M": rows, "F": width}, make=make, ours=swiglu,
        peers={"torch_compile": lambda x: compiled(torch_swiglu)(x)}, fwd_bytes=cost.bytes(rows, width),
        bwd_bytes=cost.backward_bytes(rows, width),
        counted="bytes 3 M F item (gate, up, result); backward 5 M F item (gate, up, gradient in, two out)")


def cases() -> list[Case]:
    return [_case(width) for width in (1024, 4096)]
