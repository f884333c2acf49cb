"""The truth the tests compare with: one sample at a time, one formula, fp64, torch's own activations and autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opengem.kernels.gdpa.activations import POLY, POLY_CLAMP


def poly(x):
    c = x.clamp(-POLY_CLAMP, POLY_CLAMP)
    return x * (0.5 + sum(a * c ** (2 * i + 1) for i, a in enumerate(POLY)))


def taylor6(x):
    return 0.5 * x + (x**2 - x**4 / 6 + x**6 / 40) / (2 * torch.pi) ** 0.5


FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_poly": poly,
    "gelu_taylor6": taylor6,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "hardswish": F.hardswish,
    "identity": lambda x: x,
}


def gdpa(q, k, v, q_lengths, kv_lengths, activation="gelu", scale=1.0, shared_q=False, dtype=torch.float64):
    """`out` in `dtype`, differentiable; `q` is `[S, H, D]` with shared_q."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if activation == "gelu_taylor6":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    out, q_start, kv_start = [], 0, 0
    for nq, nk in zip(q_lengths, kv_lengths, strict=True):
        qb = q if shared_q else q[q_start : q_start + nq]
        kb, vb = k[kv_start : kv_start + nk], v[kv_start : kv_start + nk]
        p = FUNCTIONS[activation](scale * torch.einsum("ihd,jhd->hij", qb, kb))
        out.append(torch.einsum("hij,jhd->ihd", p, vb))
        q_start, kv_start = q_start + nq, kv_start + nk
    return torch.cat(out) if out else q.new_zeros(0, *q.shape[1:])


def gradients(out, inputs, grad):
    """Gradients of `inputs` for the output gradient `grad`; zeros where an input did not take part."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(out, inputs, grad.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
