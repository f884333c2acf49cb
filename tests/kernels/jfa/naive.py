"""Attention one sample and one head at a time in fp64: the truth of every test. Shares no code with the package."""

from __future__ import annotations

import torch

from opengem.kernels.jfa.op import PairBias


def attention(q, k, v, q_lengths, kv_lengths, *, scale=None, causal=False, window=None, bias=None, dtype=torch.float64):
    """(out, lse) computed in `dtype`, differentiable. Arguments as for the op, lengths as lists."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out, lse, q_at, k_at, cell = [], [], 0, 0, 0
    for m, n in zip(q_lengths, kv_lengths, strict=True):
        seen = mask(m, n, causal, window).to(q.device)
        sample, sample_lse = [], []
        for h in range(q.shape[1]):
            keys = k[k_at : k_at + n, h // group]
            score = scale * q[q_at : q_at + m, h] @ keys.T
            if isinstance(bias, PairBias):
                score = score + bias.values[h, cell : cell + m * n].to(dtype).view(m, n)
            elif bias is not None:
                radius = bias.table.shape[1] // 2
                distance = torch.arange(n, device=q.device) - (torch.arange(m, device=q.device)[:, None] + n - m)
                score = score + bias.table[h].to(dtype)[distance.clamp(-radius, radius) + radius]
            alive = seen.any(1)
            safe = score.masked_fill(~seen, float("-inf")).masked_fill(~alive[:, None], 0)
            p = safe.softmax(-1) * alive[:, None] if n else score
            sample.append(p @ v[k_at : k_at + n, h // group])
            total = safe.logsumexp(-1) if n else score.new_zeros(m)
            sample_lse.append(total.masked_fill(~alive, float("-inf")))
        out.append(torch.stack(sample, 1))
        lse.append(torch.stack(sample_lse))
        q_at, k_at, cell = q_at + m, k_at + n, cell + m * n
    if not out:
        return q[:0] * 1.0, q.new_zeros(q.shape[1], 0)
    return torch.cat(out), torch.cat(lse, 1)


def mask(m: int, n: int, causal: bool = False, window: tuple[int, int] | None = None) -> torch.Tensor:
    """bool [m, n], written cell by cell."""
    left, right = window or (-1, -1)
    seen = torch.zeros(m, n, dtype=torch.bool)
    for i in range(m):
        position = i + n - m
        first = 0 if left < 0 else max(0, position - left)
        last = n - 1 if right < 0 else min(n - 1, position + right)
        if causal:
            last = min(last, position)
        seen[i, first : last + 1] = True if last >= first else seen[i, first : last + 1]
    return seen
