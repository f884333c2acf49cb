"""AdamW for all parameters of a model in one launch: gradients in, fp32 parameters and their 16-bit copies out.

A program takes a chunk of one tensor and finds it by a table of distances, so that a model of many small tensors costs
one launch. Each byte moves once: the gradient is clipped on the way, and the copy that computes the next step is
written in the same pass.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.launch import multiprocessors

CHUNK = 2048  # elements a program takes
COLUMNS = 6  # of the table: where parameter, two moments, gradient and copy are, and the number of elements


@triton.jit
def _chunk(
    parameter, first, second, grad, copy, at, size, shrink, decay, correction1, correction2, lr, beta1, beta2, eps,
    COPIES: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):
    at += tl.arange(0, CHUNK)
    mask = tl.full([CHUNK], True, tl.int1) if WHOLE else at < size  # a mask would keep loads from being wide
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * shrink
    p = tl.load(parameter + at, mask=mask, other=0.0)
    m = tl.load(first + at, mask=mask, other=0.0)
    v = tl.load(second + at, mask=mask, other=0.0)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    root = tl.sqrt_rn(v) / tl.sqrt_rn(correction2)
    p = p - p * (lr * decay) - lr / correction1 * m / (root + eps)
    tl.store(parameter + at, p, mask=mask)
    tl.store(first + at, m, mask=mask)
    tl.store(second + at, v, mask=mask)
    if COPIES:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def _adamw(
    table, owners, starts, decays, corrections, norm, skip, parameter, grad, copy, limit, lr, beta1, beta2, eps,
    COPIES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):
    """parameter, grad, copy: the first tensor of each kind; the table says how many elements away the others are."""
    if tl.load(skip) == 0:
        owner = tl.load(owners + tl.program_id(0))
        row = table + owner * COLUMNS
        at = tl.multiple_of(tl.load(starts + tl.program_id(0)), CHUNK)
        size = tl.load(row + 5)
        shrink = tl.minimum(limit / (tl.load(norm) + 1e-6), 1.0)
        first = parameter + tl.multiple_of(tl.load(row + 1), 4)
        second = parameter + tl.multiple_of(tl.load(row + 2), 4)
        parameter += tl.multiple_of(tl.load(row), 4)
        grad += tl.multiple_of(tl.load(row + 3), 16 // (grad.dtype.element_ty.primitive_bitwidth // 8))
        copy += tl.multiple_of(tl.load(row + 4), 16 // (copy.dtype.element_ty.primitive_bitwidth // 8))
        decay, correction1, correction2 = tl.load(decays + owner), tl.load(corrections), tl.load(corrections + 1)
        if at + CHUNK <= size:
            _chunk(parameter, first, second, grad, copy, at, size, shrink, decay, correction1, correction2, lr, beta1,
                   beta2, eps, COPIES, CHUNK, True)
        else:
            _chunk(parameter, first, second, grad, copy, at, size, shrink, decay, correction1, correction2, lr, beta1,
                   beta2, eps, COPIES, CHUNK, False)


@functools.lru_cache(4)
def _chunks(sizes: tuple[int, ...], decays: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tensor of each chunk, its first element, decay of each tensor)."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = (torch.arange(owners.shape[0]) - (counts.cumsum(0) - counts)[owners]) * CHUNK
    return owners.int().to(device), starts.to(device), torch.tensor(decays, dtype=torch.float32, device=device)


def _aligned(x: Tensor) -> Tensor:
    """A gradient may be a slice of another one's memory."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def adamw(
    parameters: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], grads: list[Tensor],
    copies: list[Tensor] | None, decays: tuple[float, ...], corrections: Tensor, norm: Tensor, skip: Tensor,
    limit: float, lr: float, betas: tuple[float, float], eps: float,
) -> None:
    """One step in place, nothing where `skip` is not 0; no host sync.

    parameters, firsts, seconds (moments): fp32; grads, copies: each of one dtype; alike in number and sizes; all but
    the gradients contiguous and aligned to 16 bytes. decays: weight decay of each. corrections: fp32 `[2]`,
    `1 - beta ** step`. norm, skip: fp32 scalars; gradients of a larger norm than `limit` are scaled down to it.
    """
    device = parameters[0].device
    grads = [_aligned(grad) for grad in grads]
    bases = parameters[0], parameters[0], parameters[0], grads[0], (copies or parameters)[0]
    lists = parameters, firsts, seconds, grads, copies or parameters
    away = ([(x.data_ptr() - base.data_ptr()) // base.element_size() for x in tensors]
            for base, tensors in zip(bases, lists, strict=True))
    sizes = tuple(parameter.numel() for parameter in parameters)
    table = torch.tensor([*zip(*away, sizes, strict=True)], dtype=torch.int64, pin_memory=device.type == "cuda")
    owners, starts, decay = _chunks(sizes, decays, device)
    if owners.shape[0]:
        _adamw[(owners.shape[0],)](
            table.to(device, non_blocking=True), owners, starts, decay, corrections, norm, skip, bases[0], bases[3],
            bases[4], limit, lr, *betas, eps, copies is not None, COLUMNS, CHUNK, num_warps=8)


@triton.jit(do_not_specialize=["size"])
def _clear(x, flag, size, CHUNK: tl.constexpr):
    if tl.load(flag) != 0:
        for start in range(tl.program_id(0), tl.cdiv(size, CHUNK), tl.num_programs(0)):
            at = (tl.zeros([], tl.int64) + start) * CHUNK + tl.arange(0, CHUNK)
            tl.store(x + at, tl.zeros([CHUNK], x.dtype.element_ty), mask=at < size)


def clear(x: Tensor, flag: Tensor) -> None:
    """Zeros in place of contiguous x if `flag` (fp32, 0-dim) is not 0; otherwise x is not even read."""
    if x.numel():
        _clear[(8 * multiprocessors(x.device),)](x, flag, x.numel(), CHUNK)
