"""Other backward kernels of jagged flash attention, kept to measure against the split one. Full self-attention only.

`atomic`: a block owns a key tile and adds to dq with fp32 atomics (five products; the yardstick, its bits vary).
`owner`: a block owns a whole sample and head, longest samples first, and adds its dq tiles in fp32 through memory that
no other block touches (five products, no atomics, one order). Parallel only as far as samples x heads go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.jfa.triton import LOG2E, _locate, _partner, _rows, _store_rows

BLOCK_M, BLOCK_N = 64, 128


@triton.jit(do_not_specialize=["rows"])
def _delta_kernel(
    out_ptr, dout_ptr, delta_ptr, dout_stride, rows, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """delta = sum(out * dout) for BLOCK rows of one head; `out` is dense, heads of `dout` stand side by side."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    live = row < rows
    out = tl.load(out_ptr + row[:, None] * (tl.num_programs(1) * HEAD_DIM) + column, mask=live[:, None], other=0.0)
    dout = tl.load(dout_ptr + row[:, None] * dout_stride + column, mask=live[:, None], other=0.0)
    tl.store(delta_ptr + head * rows + row, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=live)


@triton.jit
def _key_tile(
    first, q_base, k_base, v_base, dout_base, lse_base, delta_base, dq_base, dk_base, dv_base, q_stride, k_stride,
    v_stride, dout_stride, dq_stride, n, scale,
    ATOMIC: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dk and dv of keys [first, first + BLOCK_N), and their share of every dq row of the sample."""
    j = first + tl.arange(0, BLOCK_N)
    k = _rows(k_base, j, n, k_stride, True, HEAD_DIM, HEAD_DIM)
    v = _rows(v_base, j, n, v_stride, True, HEAD_DIM, HEAD_DIM)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    column = tl.arange(0, HEAD_DIM)[None, :]
    for i0 in tl.range(0, n, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        q = _rows(q_base, i, n, q_stride, True, HEAD_DIM, HEAD_DIM)
        dout = _rows(dout_base, i, n, dout_stride, True, HEAD_DIM, HEAD_DIM)
        lse2 = tl.load(lse_base + i, mask=i < n, other=float("inf")) * LOG2E
        delta = tl.load(delta_base + i, mask=i < n, other=0.0)
        p = tl.exp2(tl.dot(k, q.T) * (scale * LOG2E) - lse2[None, :])
        p = tl.where((j < n)[:, None], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = (p * (tl.dot(v, dout.T) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        address = dq_base + i.to(tl.int64)[:, None] * dq_stride + column
        share = tl.dot(tl.trans(ds), k) * scale
        if ATOMIC:
            tl.atomic_add(address, share, mask=(i < n)[:, None], sem="relaxed")
        else:
            before = tl.load(address, mask=(i < n)[:, None], other=0.0)
            tl.store(address, before + share, mask=(i < n)[:, None])
    _store_rows(dk_base, j, n, dq_stride, dk * scale, HEAD_DIM, HEAD_DIM)
    _store_rows(dv_base, j, n, dq_stride, dv, HEAD_DIM, HEAD_DIM)


@triton.jit(do_not_specialize=["total", "batch", "steps"])
def _kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, order_ptr, q_stride,
    k_stride, v_stride, dout_stride, dq_stride, total, batch, steps, scale,
    ATOMIC: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    if ATOMIC:
        sample, begin, n, first = _locate(offsets_ptr, tl.program_id(0), total, batch, steps, BLOCK_N)
        end = first + 1
    else:
        begin, n = _partner(offsets_ptr, tl.load(order_ptr + tl.program_id(0)), batch)
        first = 0
        end = n
    if first >= n:
        return
    q_base = q_ptr + begin * q_stride + head * HEAD_DIM
    k_base = k_ptr + begin * k_stride + head * HEAD_DIM
    v_base = v_ptr + begin * v_stride + head * HEAD_DIM
    dout_base = dout_ptr + begin * dout_stride + head * HEAD_DIM
    own = begin * dq_stride + head * HEAD_DIM
    row = head * total + begin
    for start in range(first, end, BLOCK_N):
        _key_tile(
            start, q_base, k_base, v_base, dout_base, lse_ptr + row, delta_ptr + row, dq_ptr + own, dk_ptr + own,
            dv_ptr + own, q_stride, k_stride, v_stride, dout_stride, dq_stride, n, scale, ATOMIC, HEAD_DIM, BLOCK_M,
            BLOCK_N)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Tensor, version: str):
    """(dq, dk, dv) of full self-attention, scale `1 / sqrt(D)`; dense q, k, v, dout `[T, H, D]`, D a power of two."""
    total, heads, dim = q.shape
    batch = offsets.shape[0] - 1
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(total, 64), heads)](
        out, dout, delta, dout.stride(0), total, HEAD_DIM=dim, BLOCK=64, num_warps=4)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    atomic = version == "atomic"
    order = torch.argsort(offsets.diff(), descending=True, stable=True)
    blocks = total // BLOCK_N + batch + 1 if atomic else batch
    _kernel[(blocks, heads)](
        q, k, v, dout, lse, delta, dq, dk, dv, offsets, order, q.stride(0), k.stride(0), v.stride(0), dout.stride(0),
        heads * dim, total, batch, batch.bit_length(), dim**-0.5, ATOMIC=atomic, HEAD_DIM=dim, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, num_warps=8, num_stages=2)
    return dq.to(q.dtype), dk, dv
