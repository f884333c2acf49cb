"""The feature side of a layer: a summary of all tokens, Wukong experts, attention to earlier layers.

Tokens here are dense `[B, n, d]`. Read `blocks.py` next.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.kernels.norm.op import layer_norm


class TokenMix(nn.Module):
    """A linear map along the token axis, the same for every channel: `[B, n_in, d]` to `[B, n_out, d]` (LCE)."""

    def __init__(self, tokens_in: int, tokens_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens_out, tokens_in).uniform_(-1, 1) * tokens_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return mix_tokens(self.weight, x)

    def flops(self, rows: int, dim: int) -> int:
        return 2 * rows * dim * self.weight.numel()


def mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """`weight @ x[b]` for each sample: `[m, n]`, `[B, n, d]` to `[B, m, d]`, without transposing x in memory."""
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)


class Gate(nn.Module):
    """`x * sigmoid(W x)`: lets a layer silence what it does not need (InterFormer, arXiv 2411.09852)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.map(x))

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.map.weight.numel()


class WeightGeneration(nn.Module):
    """Normalised X `[B, n, d]` to its summary `[B, num_summary, d]`: token-axis compression, two-layer MLP, gate."""

    def __init__(self, tokens: int, summary: int, dim: int) -> None:
        super().__init__()
        self.compress = TokenMix(tokens, summary)
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.gate = Gate(dim)

    def forward(self, x: Tensor) -> Tensor:
        summary = self.compress(x)
        summary = summary + self.outer(F.gelu(self.inner(layer_norm(summary))))
        return self.gate(summary)

    def flops(self, rows: int) -> int:
        tokens, dim = rows * self.compress.weight.shape[0], self.inner.in_features
        return self.compress.flops(rows, dim) + 4 * tokens * dim * dim + self.gate.flops(tokens)


class WukongExpert(nn.Module):
    """One Wukong layer (arXiv 2403.02545): `[B, n, d]` to `[B, fm_tokens + linear_tokens, d]`.

    A factorisation machine X Xᵀ Y with learned Y `[n, rank]`, computed as X (Xᵀ Y), goes through an MLP to `fm_tokens`
    tokens; a linear compression gives the others; both are added to the compressed input and normalised.
    """

    def __init__(self, tokens: int, dim: int, fm_tokens: int, linear_tokens: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.dim, self.fm_tokens = tokens, dim, fm_tokens
        self.rows = linear_tokens, rank
        self.linear = TokenMix(tokens, linear_tokens)
        if fm_tokens:
            self.project = TokenMix(tokens, rank)
            self.inner = nn.Linear(tokens * rank, hidden)
            self.outer = nn.Linear(hidden, fm_tokens * dim)
        self.shortcut = TokenMix(tokens, fm_tokens + linear_tokens)

    def forward(self, x: Tensor) -> Tensor:
        linear = F.pad(self.linear.weight, (0, 0, self.fm_tokens, 0)) + self.shortcut.weight
        if not self.fm_tokens:
            return layer_norm(mix_tokens(linear, x))
        mixed = mix_tokens(torch.cat([linear, self.project.weight]), x)  # all maps along the token axis at once
        fm, linear, projected = mixed.split([self.fm_tokens, *self.rows], 1)
        products = x @ projected.transpose(1, 2)  # [B, n, rank]
        hidden = F.gelu(self.inner(layer_norm(products.flatten(1))))
        return layer_norm(torch.cat([fm + self.outer(hidden).unflatten(1, fm.shape[1:]), linear], 1))

    def flops(self, rows: int) -> int:
        total = self.shortcut.flops(rows, self.dim)
        if self.fm_tokens:
            rank = self.project.weight.shape[0]
            total += self.project.flops(rows, self.dim) + 2 * rows * self.tokens * self.dim * rank
            total += 2 * rows * (self.inner.weight.numel() + self.outer.weight.numel())
        return total


class Experts(nn.Module):
    """Experts side by side, each on its own partition of the tokens, outputs concatenated; there is no router.

    Token i goes to expert i mod M, so that each sees features and every history. Missing tokens of the last round are
    zeros. `[B, n, d]` to `[B, M * (fm_tokens + linear_tokens), d]`. The experts share no parameter, so they can live on
    different ranks (`parallel/expert.py`).
    """

    def __init__(self, tokens: int, experts: int, dim: int, fm_tokens: int, linear_tokens: int, rank: int,
                 hidden: int) -> None:
        super().__init__()
        each = -(-tokens // experts)
        self.padding = each * experts - tokens
        self.experts = nn.ModuleList(
            WukongExpert(each, dim, fm_tokens, linear_tokens, rank, hidden) for _ in range(experts)
        )

    def partition(self, x: Tensor) -> tuple[Tensor, ...]:
        """One `[B, n / M, d]` for each expert."""
        padded = F.pad(x, (0, 0, 0, self.padding)) if self.padding else x
        return padded.unflatten(1, (-1, len(self.experts))).unbind(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([expert(part) for expert, part in zip(self.experts, self.partition(x), strict=True)], 1)

    def flops(self, rows: int) -> int:
        return sum(expert.flops(rows) for expert in self.experts)


class CrossLayerAttention(nn.Module):
    """Tokens of this layer attend to the outputs of all earlier layers: `x + gate * attention(x, earlier)`.

    The gate starts at 0, so a new layer starts as if it were not there. Both are normalised: `x`
    `[B, n, d]`, `earlier` `[B, m, d]`. The mechanism is described for GEM without detail; this reading is ours.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.gate = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        (samples, n, dim), m = x.shape, earlier.shape[1]
        q = self.query(x).reshape(samples * n, self.heads, dim // self.heads)
        k, v = self.key_value(earlier).reshape(samples * m, 2, self.heads, dim // self.heads).unbind(1)
        rows = (torch.arange(0, samples * count + 1, count, device=x.device) for count in (n, m))
        out = jagged_flash_attention(q, k, v, *rows, max_q=n, max_kv=m)
        return torch.addcmul(x, self.gate.to(x.dtype), self.out(out.reshape(samples, n, dim)).to(x.dtype))

    def flops(self, rows: int, n: int, m: int) -> int:
        dim = self.query.in_features
        return rows * (4 * n * dim * dim + 4 * m * dim * dim + 4 * n * m * dim)
