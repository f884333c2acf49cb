"""Norms (plain, with residual, quantised) against torch.compile of the same formula.

Bytes as in `opengem.kernels.norm.cost`. Inputs and outputs are 256 MiB and more each, over four times the L2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.kernels.mx import torch_quantize
from benchmarks.registry import Case, compiled
from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm import cost
from opengem.kernels.norm.op import layer_norm, rms_norm

ELEMENTS = 1 << 28


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
    return torch_quantize(torch_rms(x, residual, weight))


def torch_rms_residual_quantize(x, residual, weight):
    y, total = torch_rms_residual(x, residual, weight)
    return *torch_quantize(y), total


def _norm(name: str, width: int, ours, peers: dict, *, backward: bool = True, tolerance: float = 2e-2,
          **counted: bool) -> Case:
    rows = ELEMENTS // width
    written = "1 + 1 / 1024 (y in blocks)" if counted.get("quantize") else "2 (y)"
    behind = "; backward 2 (x) + 2 (dy) + 2 (dx)" if backward else ""
    more = " + 2 (residual) + 2 (sum)" if counted.get("residual") else ""
    return Case(
        op="norm", name=name, shape={"M": rows, "N": width}, make=lambda device, seed: make(device, seed, width),
        ours=ours, peers=peers, tolerance=tolerance, fwd_bytes=cost.bytes(rows, width, **counted),
        bwd_bytes=cost.backward_bytes(rows, width) if backward else 0,
        counted=f"bytes an element: 2 (x){more} + {written}{behind}")


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
    for width in (256, 512, 1024, 2048, 4096):
        out.append(_norm(f"rms_quantize_{width}", width, lambda x, r, w: rms_norm(x, w, quantize="e4m3").data,
                         {"torch_compile": lambda x, r, w: compiled(torch_rms_quantize)(x, r, w)[0],
                          "opengem_unfused": lambda x, r, w: quantize_mx(rms_norm(x, w)).data},
                         backward=False, quantize=True, tolerance=5e-2))  # compiled, y is not rounded to bf16 first
    for width in (512, 1024, 2048, 4096):
        out.append(_norm(f"rms_residual_quantize_{width}", width,
                         lambda x, r, w: rms_norm(x, w, residual=r, quantize="e4m3")[0].data,
                         {"torch_compile": lambda x, r, w: compiled(torch_rms_residual_quantize)(x, r, w)[0],
                          "opengem_unfused": lambda x, r, w: quantize_mx(rms_norm(x, w, residual=r)[0]).data},
                         backward=False, quantize=True, residual=True, tolerance=5e-2))
    return out
