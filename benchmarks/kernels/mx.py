"""MX quantisation in 32x32 blocks against torch.compile of the same scale rule. Bytes: x and one byte an element."""

from __future__ import annotations

import torch

from benchmarks.registry import Case, compiled
from opengem.kernels.mx.op import quantize_mx

ELEMENTS = 1 << 28


def torch_quantize(x):
    """(elements, scales) by the rule of `opengem.kernels.mx.reference`, written so that the compiler can fuse it."""
    blocks = x.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    bits = blocks.abs().amax((1, 3), keepdim=True).view(torch.int32)
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=0)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return (blocks * inverse).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def _case(width: int) -> Case:
    rows = ELEMENTS // width

    def make(device: torch.device, seed: int) -> tuple:
        torch.manual_seed(seed)
        return (torch.randn(rows, width, device=device, dtype=torch.bfloat16),)

    return Case(
        op="mx", name=f"quantize_{width}", shape={"M": rows, "K": width}, make=make, ours=lambda x: quantize_mx(x).data,
        peers={"torch_compile": lambda x: compiled(torch_quantize)(x)[0]}, fwd_bytes=3 * ELEMENTS + ELEMENTS // 1024,
        counted="bytes an element: 2 + 1 + 1 / 1024")


def cases() -> list[Case]:
    return [_case(width) for width in (256, 1024, 4096)]
