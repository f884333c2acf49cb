"""Earlier forward kernels of jagged flash attention, kept to measure what each step brought. Full attention only.

`mask_all`: every tile evaluates a two-dimensional mask (v1). `subtract`: no mask at all; rows that do not exist are
zeros, so each adds exp(0 - max) to the sum, which is taken off at the end (v2, the published scheme). `mask_tail`: the
loop over full tiles has no mask, one masked tile follows (v2, what the package does).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opengem.kernels.jfa.triton import LOG2E, _locate, _partner, _rows, _store_rows, config

SCHEMES = {"mask_all": 0, "subtract": 1, "mask_tail": 2}


@triton.jit
def _step(
    acc, row_max, row_sum, q, i, j0, k_base, v_base, k_stride, v_stride, m, n, scale2,
    LOAD_MASK: tl.constexpr, SCORE_MASK: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    j = j0 + tl.arange(0, BLOCK)
    k = _rows(k_base, j, n, k_stride, LOAD_MASK, HEAD_DIM, HEAD_DIM)
    v = _rows(v_base, j, n, v_stride, LOAD_MASK, HEAD_DIM, HEAD_DIM)
    score = tl.dot(q, k.T)
    if SCORE_MASK:
        score = tl.where((i < m)[:, None] & (j < n)[None, :], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1) * scale2)
    shift = new_max
    if SCORE_MASK:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(score * scale2 - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    return tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), new_max, row_sum


@triton.jit(do_not_specialize=["total_q", "batch", "steps"])
def _kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_offsets_ptr, kv_offsets_ptr, q_stride, k_stride, v_stride, total_q, batch,
    steps, scale2, SCHEME: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    sample, q_begin, m, first = _locate(q_offsets_ptr, tl.program_id(0), total_q, batch, steps, BLOCK_M)
    if first >= m:
        return
    k_begin, n = _partner(kv_offsets_ptr, sample, batch)
    k_base = k_ptr + k_begin * k_stride + head * HEAD_DIM
    v_base = v_ptr + k_begin * v_stride + head * HEAD_DIM
    i = first + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + q_begin * q_stride + head * HEAD_DIM, i, m, q_stride, True, HEAD_DIM, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    full = n // BLOCK_N * BLOCK_N if SCHEME == 2 else 0
    for j0 in tl.range(0, full, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, i, j0, k_base, v_base, k_stride, v_stride, m, n, scale2, False, False, BLOCK_N,
            HEAD_DIM)
    for j0 in tl.range(full, n, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, i, j0, k_base, v_base, k_stride, v_stride, m, n, scale2, True, SCHEME != 1,
            BLOCK_N, HEAD_DIM)
    if SCHEME == 1:
        missing = (n + BLOCK_N - 1) // BLOCK_N * BLOCK_N - n
        row_sum -= missing.to(tl.float32) * tl.exp2(-row_max)
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    _store_rows(out_ptr + q_begin * q_stride + head * HEAD_DIM, i, m, q_stride, out, HEAD_DIM, HEAD_DIM)
    lse = (row_max + tl.log2(row_sum)) / LOG2E
    tl.store(lse_ptr + head * total_q + q_begin + i, lse, mask=i < m)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scheme: str) -> Tensor:
    """Full self-attention of dense bf16 q, k, v `[T, H, D]` (D a power of two)."""
    total, heads, dim = q.shape
    batch, tile = offsets.shape[0] - 1, config("forward", dim, False)
    out = torch.empty_like(q)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    _kernel[(total // tile.own + batch + 1, heads)](
        q, k, v, out, lse, offsets, offsets, q.stride(0), k.stride(0), v.stride(0), total, batch, batch.bit_length(),
        dim**-0.5 * LOG2E.value, SCHEME=SCHEMES[scheme], HEAD_DIM=dim, BLOCK_M=tile.own, BLOCK_N=tile.stream,
        num_warps=tile.warps, num_stages=tile.stages)
    return out
