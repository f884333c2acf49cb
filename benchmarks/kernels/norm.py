"""Norms (plain, with residual, quantised) and SwiGLU against torch.compile of the same formula.

Bytes as in their cost.py. Inputs and outputs are 256 MiB and more each, over four times the L2.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from benchmarks.registry import Case
from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm import cost
from opengem.kernels.norm.op import layer_norm, rms_norm
from opengem.kernels.swiglu import cost as swiglu_cost
from opengem.kernels.swiglu.op import swiglu

ELEMENTS = 1 << 28


@cache
def compiled(function):
    return torch.compile(function, dynamic=False)


def make(device: torch.device, seed: int, width: int) -> tuple:
    """x, residual, weight."""
    torch.manual_seed(seed)
    x, residual = (torch.randn(ELEMENTS // width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), residual, torch.randn(width, device=device).requires_grad_()


def torch_rms(x, residual, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def torch_layer(x, residual, weight):
    return F.layer_norm(x.float(), x.shape[1:], weight, None, 1e-5).to(x.dtype)


def torch_rms_residual(x, residual, weight):
    total = x + residual
    return torch_rms(total, None, weight), total


def torch_rms_quantize(x, residual, weight):
    """The same scale rule written so that the compiler can fuse it."""
    y = torch_rms(x, residual, weight).float()
    blocks = y.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    bits = blocks.abs().amax((1, 3), keepdim=True).view(torch.int32)
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=0)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return (blocks * inverse).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def torch_swiglu(x):
    gate, up = x.float().chunk(2, 1)
    return (F.silu(gate) * up).to(x.dtype)


def _norm(name: str, width: int, ours, peers: dict, *, backward: bool = True, **counted: bool) -> Case:
    rows = ELEMENTS // width
    return Case(
        op="norm", name=name, shape={"M": rows, "N": width}, make=lambda device, seed: make(device, seed, width),
        ours=ours, peers=peers, fwd_bytes=cost.bytes(rows, width, **counted),
        bwd_bytes=cost.backward_bytes(rows, width) if backward else 0)


def _swiglu(width: int) -> Case:
    rows = ELEMENTS // 2 // width

    def make_gates(device: torch.device, seed: int) -> tuple:
        torch.manual_seed(seed)
        return (torch.randn(rows, 2 * width, device=device, dtype=torch.bfloat16).requires_grad_(),)

    return Case(
        op="norm", name=f"swiglu_{width}", shape={"M": rows, "F": width}, make=make_gates, ours=swiglu,
        peers={"torch_compile": lambda x: compiled(torch_swiglu)(x)}, fwd_bytes=swiglu_cost.bytes(rows, width),
        bwd_bytes=swiglu_cost.backward_bytes(rows, width))


def cases() -> list[Case]:
    out = []
    for width in (256, 1024, 4096):
        out.append(_norm(f"rms_{width}", width, lambda x, r, w: rms_norm(x, w),
                         {"torch_compile": lambda x, r, w: compiled(torch_rms)(x, r, w)}))
        out.append(_norm(f"layer_{width}", width, lambda x, r, w: layer_norm(x, w),
                         {"torch_compile": lambda x, r, w: compiled(torch_layer)(x, r, w)}))
    for width in (512, 1024):
        out.append(_norm(f"rms_residual_{width}", width, lambda x, r, w: rms_norm(x, w, residual=r)[0],
                         {"torch_compile": lambda x, r, w: compiled(torch_rms_residual)(x, r, w)[0]}, residual=True))
        out.append(_norm(f"rms_quantize_{width}", width, lambda x, r, w: rms_norm(x, w, quantize="e4m3").data,
                         {"torch_compile": lambda x, r, w: compiled(torch_rms_quantize)(x, r, w)[0],
                          "opengem_unfused": lambda x, r, w: quantize_mx(rms_norm(x, w)).data},
                         backward=False, quantize=True))
    return [*out, _swiglu(1024), _swiglu(4096)]
