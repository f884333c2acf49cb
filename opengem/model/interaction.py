"""The feature side of a layer: a summary of all tokens, Wukong experts, attention to earlier layers.

Tokens here are dense `[B, n, d]`. Read `blocks.py` next.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from opengem.kernels.copy import put
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


class Experts(nn.Module):
    """Wukong layers (arXiv 2403.02545) side by side, each on its own partition of the tokens; there is no router.

    `[B, n, d]`, given in parts along the tokens, to `[B, M * (fm_tokens + linear_tokens), d]`, expert by expert. Token
    i goes to expert i mod M, so that each sees features and every history. Missing tokens of the last round are zeros.

    A factorisation machine X Xᵀ Y with learned Y `[n / M, rank]`, computed as X (Xᵀ Y), goes through an MLP to
    `fm_tokens` tokens; a linear compression gives the others; both are added to the compressed input and normalised.

    The experts share no parameter; those of one kind lie one behind the other along the first dimension, so that all
    experts are one product, and can be split over ranks along it.
    """

    def __init__(self, tokens: int, experts: int, dim: int, fm_tokens: int, linear_tokens: int, rank: int,
                 hidden: int) -> None:
        super().__init__()
        each = self.each = -(-tokens // experts)
        self.tokens, self.experts, self.dim, self.fm_tokens, self.linear_tokens = (
            tokens, experts, dim, fm_tokens, linear_tokens)

        def uniform(*shape: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-1, 1) * inputs**-0.5)

        self.linear = uniform(experts, linear_tokens, each, inputs=each)
        self.shortcut = uniform(experts, fm_tokens + linear_tokens, each, inputs=each)
        if fm_tokens:
            self.project = uniform(experts, rank, each, inputs=each)
            self.inner = uniform(experts, each * rank, hidden, inputs=each * rank)
            self.inner_bias = uniform(experts * hidden, inputs=each * rank)  # of one dimension, so without weight decay
            self.outer = uniform(experts, hidden, fm_tokens * dim, inputs=hidden)
            self.outer_bias = uniform(experts * fm_tokens * dim, inputs=hidden)

    def partition(self, parts: list[Tensor]) -> Tensor:
        """`[M * B, rows, d]`: the tokens of each expert, zeros behind them up to a multiple of 8 rows, since matrix
        products of any other inner size are several times slower."""
        if any(part.shape[1] % self.experts for part in parts):
            missing = -self.tokens % self.experts
            parts = [torch.cat([*parts, parts[0].new_zeros(parts[0].shape[0], missing, self.dim)], 1)]
        return _Deal.apply(self.experts, -(-self.each // 8) * 8, *parts).flatten(0, 1)

    def mix(self, maps: Tensor, x: Tensor) -> Tensor:
        """`[M, m, each]` along the tokens of `[M * B, rows, d]`."""
        maps = F.pad(maps, (0, x.shape[1] - self.each))[:, None].expand(-1, x.shape[0] // self.experts, -1, -1)
        return torch.bmm(maps.flatten(0, 1), x)

    def forward(self, parts: list[Tensor]) -> Tensor:
        x = self.partition(parts)
        linear = F.pad(self.linear, (0, 0, self.fm_tokens, 0)) + self.shortcut
        if not self.fm_tokens:
            return self.join(self.mix(linear, x))
        mixed = self.mix(torch.cat([linear, self.project], 1), x)  # all maps along the token axis at once
        fm, linear, projected = mixed.split([self.fm_tokens, self.linear_tokens, self.project.shape[1]], 1)
        products = x @ projected.transpose(1, 2)  # [M * B, rows, rank]
        products = layer_norm(products[:, : self.each].flatten(1)).unflatten(0, (self.experts, -1))
        hidden = F.gelu(_linear(products, self.inner, self.inner_bias))
        return self.join(torch.cat([fm + _linear(hidden, self.outer, self.outer_bias).reshape(fm.shape), linear], 1))

    def join(self, tokens: Tensor) -> Tensor:
        """Normalised, the experts of a sample side by side."""
        return layer_norm(tokens).unflatten(0, (self.experts, -1)).transpose(0, 1).flatten(1, 2)

    def flops(self, rows: int) -> int:
        total = 2 * rows * self.dim * self.shortcut.numel()
        if self.fm_tokens:
            total += 4 * rows * self.dim * self.project.numel()
            total += 2 * rows * (self.inner.numel() + self.outer.numel())
        return total


class _Deal(torch.autograd.Function):
    """Token i of all parts `[B, n, d]`, joined, to place i // M of expert i mod M: `[M, B, rows, d]`, zeros behind
    them. Each number of tokens is a multiple of M. One pass, where a join and a change of layout are two."""

    @staticmethod
    def forward(ctx, experts: int, rows: int, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[1] // experts for part in parts]
        out = parts[0].new_empty(experts, parts[0].shape[0], rows, parts[0].shape[2])
        *places, rest = out.split([*ctx.sizes, rows - sum(ctx.sizes)], 2)
        for part, place in zip(parts, places, strict=True):
            put(place.permute(1, 2, 0, 3), part.unflatten(1, (place.shape[2], experts)))
        rest.zero_()
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts, samples, rows, dim = grad.shape
        made = [grad.new_empty(samples, size, experts, dim) for size in ctx.sizes]
        for own, place in zip(made, grad.split([*ctx.sizes, rows - sum(ctx.sizes)], 2), strict=False):
            put(own, place.permute(1, 2, 0, 3))
        return None, None, *[own.flatten(1, 2) for own in made]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer for each expert: `[M, B, in]` with weights `[M, in, out]`, whose gradients come in that layout."""
    return torch.baddbmm(bias.view(x.shape[0], 1, -1), x, weight)


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
