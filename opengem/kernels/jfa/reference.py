"""Jagged softmax attention in plain PyTorch: the definition the kernels are tested against, and what a CPU trains with.

Samples of similar size are gathered into padded tiles of at most `SCORES` scores, so memory is bounded whatever the
batch holds. Arithmetic is fp32 (fp64 for fp64 inputs). On a GPU the lengths stay on the device: samples are taken in
order and padded to `max_q` x `max_kv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SCORES = 1 << 22  # scores (heads x queries x keys, padding included) alive at once


class Options(NamedTuple):
    """What a score is and which scores count. `left` and `right` are window sizes, -1 for no limit.

    `pair` and `relative` name the kind of bias; at most one of them holds.
    """

    scale: float
    left: int = -1
    right: int = -1
    pair: bool = False
    relative: bool = False


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor]:
    """`out` like `q`, and the log-sum-exp of the scores `[H, Tq]`; 0 and -inf where a query sees no key."""
    total, heads, dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(total + 1, heads, dim)  # the last row takes what padding writes
    lse = q.new_full((heads, total + 1), float("-inf"), dtype=wide)
    for tile in _tiles(q, k, q_offsets, kv_offsets, bias, max_q, max_kv, options):
        for rows in tile.query_blocks():
            score = rows.scores(q, k, bias, options)
            row_lse = score.logsumexp(-1)
            p = _probabilities(score, row_lse)
            o = _fold(p, tile.kv_heads) @ _gather(v, tile.kv_rows, wide)
            out[rows.q_rows] = _unfold(o, heads).transpose(1, 2).to(q.dtype)
            lse[:, rows.q_rows] = row_lse.transpose(0, 1)
    return out[:total], lse[:, :total].contiguous()


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, max_q: int, max_kv: int, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias (an empty tensor without one); rows outside every sample get 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).t()  # [H, Tq]
    delta = delta if dlse is None else delta - dlse
    dq, dk, dv = (x.new_zeros(x.shape[0] + 1, *x.shape[1:]) for x in (q, k, v))
    dbias = torch.empty(0) if bias is None else bias.new_zeros(bias.shape[0], bias.shape[1] + 1, dtype=wide)
    for tile in _tiles(q, k, q_offsets, kv_offsets, bias, max_q, max_kv, options):
        tile_k, tile_v = (_gather(x, tile.kv_rows, wide) for x in (k, v))
        tile_dk, tile_dv = torch.zeros_like(tile_k), torch.zeros_like(tile_v)
        for rows in tile.query_blocks():
            tile_q, tile_do = (_fold(_gather(x, rows.q_rows, wide), tile.kv_heads) for x in (q, dout))
            p = _probabilities(rows.scores(q, k, bias, options), _columns(lse, rows.q_rows, float("-inf")))
            dp = _unfold(tile_do @ tile_v.mT, q.shape[1])
            ds = p * (dp - _columns(delta, rows.q_rows, 0)[..., None])
            folded = _fold(ds, tile.kv_heads)
            tile_dv += _fold(p, tile.kv_heads).mT @ tile_do
            tile_dk += folded.mT @ tile_q * options.scale
            rows_dq = _unfold(folded @ tile_k * options.scale, q.shape[1])
            dq[rows.q_rows] = rows_dq.transpose(1, 2).to(q.dtype)
            rows.add_bias_gradient(dbias, ds, options)
        dk[tile.kv_rows], dv[tile.kv_rows] = (x.transpose(1, 2).to(k.dtype) for x in (tile_dk, tile_dv))
    if bias is None:
        return dq[:-1], dk[:-1], dv[:-1], dbias
    return dq[:-1], dk[:-1], dv[:-1], dbias[:, : bias.shape[1]].to(bias.dtype).contiguous()


# ---- tiles -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """A block of queries of a few samples against all their keys. `q_rows` `[n, M]` is Tq where there is no query."""

    q_rows: Tensor
    kv_rows: Tensor
    visible: Tensor  # [n, M, N]
    distance: Tensor  # [n, M, N]: position of the key minus position of the query
    bias_index: Tensor | None  # [n, M, N]: column of the bias; the one behind the last where nothing is visible

    def scores(self, q: Tensor, k: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        """`[n, H, M, N]`, -inf where a key is not visible."""
        wide = torch.promote_types(q.dtype, torch.float32)
        tile_q = _fold(_gather(q, self.q_rows, wide), k.shape[1])
        score = _unfold(tile_q @ _gather(k, self.kv_rows, wide).mT * options.scale, q.shape[1])
        if bias is not None:
            last = bias.shape[1] - 1
            score = score + bias.to(wide)[:, self.bias_index.clamp(max=last)].transpose(0, 1)
        return score.masked_fill(~self.visible[:, None], float("-inf"))

    def add_bias_gradient(self, dbias: Tensor, ds: Tensor, options: Options) -> None:
        if options.pair:
            dbias[:, self.bias_index] = ds.transpose(0, 1)
        if options.relative:
            radius = dbias.shape[1] // 2 - 1
            diagonals = _diagonal_sums(ds)
            steps = torch.arange(diagonals.shape[2], device=ds.device)
            distance = self.distance[:, -1:, :1] + steps  # [n, 1, M + N - 1]
            column = torch.arange(1 - radius, max(radius, 1), device=ds.device) - distance[:, 0, :1]
            inside = (column >= 0) & (column < diagonals.shape[2])
            column = column.clamp(0, diagonals.shape[2] - 1)[:, None].expand(-1, ds.shape[1], -1)
            picked = diagonals.gather(2, column).masked_fill(~inside[:, None], 0)
            dbias[:, 1 : 2 * radius] += picked.sum(0)
            dbias[:, 0] += diagonals.masked_fill(distance > -radius, 0).sum((0, 2))
            dbias[:, 2 * radius] += diagonals.masked_fill(distance < max(radius, 1), 0).sum((0, 2))


@dataclass(frozen=True)
class _Tile:
    """A few samples of similar size: `queries` x `keys` holds the largest of them."""

    samples: Tensor
    queries: int
    keys: int
    heads: int
    kv_heads: int
    total_q: int
    kv_rows: Tensor  # [n, N], Tkv where there is no key
    q_offsets: Tensor
    kv_lengths: Tensor
    pair_offsets: Tensor | None
    bias_columns: int
    options: Options

    def query_blocks(self) -> Iterator[_Rows]:
        size = max(1, SCORES // (self.samples.shape[0] * self.heads * self.keys))
        for first in range(0, self.queries, size):
            yield self._rows(first, min(size, self.queries - first))

    def _rows(self, first: int, size: int) -> _Rows:
        device, options = self.kv_rows.device, self.options
        i = torch.arange(first, first + size, device=device)
        j = torch.arange(self.keys, device=device)
        begin = self.q_offsets[self.samples][:, None]
        m = self.q_offsets[self.samples + 1][:, None] - begin
        n = self.kv_lengths[:, None]
        distance = j - (i + n - m)[..., None]
        visible = (i < m)[..., None] & (j < n)[:, None]
        if options.left >= 0:
            visible = visible & (distance >= -options.left)
        if options.right >= 0:
            visible = visible & (distance <= options.right)
        index = None
        if options.pair:
            index = self.pair_offsets[self.samples][:, None, None] + i[:, None] * n[..., None] + j
            index = index.masked_fill(~((i < m)[..., None] & (j < n)[:, None]), self.bias_columns)
        if options.relative:
            radius = self.bias_columns // 2
            index = distance.clamp(-radius, radius) + radius
        rows = torch.where(i < m, begin + i, self.total_q)
        return _Rows(rows, self.kv_rows, visible, distance, index)


def _tiles(
    q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None,
    max_q: int, max_kv: int, options: Options,
) -> Iterator[_Tile]:
    if min(q.shape[0], k.shape[0], max_q, max_kv) == 0:
        return
    q_offsets, kv_offsets = q_offsets.long(), kv_offsets.long()
    m, n = q_offsets.diff(), kv_offsets.diff()
    pairs = torch.cat([m.new_zeros(1), (m * n).cumsum(0)]) if options.pair else None
    columns = 0 if bias is None else bias.shape[1]
    for samples, queries, keys in chunks(m, n, max_q, max_kv, q.shape[1]):
        j = torch.arange(keys, device=q.device)
        kv_rows = torch.where(j < n[samples][:, None], kv_offsets[samples][:, None] + j, k.shape[0])
        yield _Tile(samples, queries, keys, q.shape[1], k.shape[1], q.shape[0], kv_rows, q_offsets, n[samples],
                    pairs, columns, options)


def chunks(m: Tensor, n: Tensor, max_q: int, max_kv: int, heads: int) -> Iterator[tuple[Tensor, int, int]]:
    """Groups of samples of similar size (two steps an octave), each group cut to at most `SCORES` padded scores."""
    if m.device.type != "cpu":
        groups = [torch.arange(m.shape[0], device=m.device)]
    else:
        alive = ((m > 0) & (n > 0)).nonzero()[:, 0]
        step = torch.stack([m[alive], n[alive]]).double().log2().mul(2).ceil().long()
        group = (step[0] * 128 + step[1]).unique(return_inverse=True)[1]
        groups = list(alive[group.argsort(stable=True)].split(group.bincount().tolist())) if alive.numel() else []
    for samples in groups:
        on_host = m.device.type == "cpu"
        queries, keys = (int(m[samples].max()), int(n[samples].max())) if on_host else (max_q, max_kv)
        for part in samples.split(max(1, SCORES // (heads * queries * keys))):
            yield part, queries, keys


# ---- arithmetic ------------------------------------------------------------------------------------------------


def _gather(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, heads, L, D]`: rows of `x`, zeros where a row number is behind the end (never a neighbour's values)."""
    picked = x[rows.clamp(max=x.shape[0] - 1)].to(dtype)
    return picked.masked_fill((rows >= x.shape[0])[..., None, None], 0).transpose(1, 2)


def _columns(x: Tensor, rows: Tensor, fill: float) -> Tensor:
    """`[H, T]` to `[n, H, M]`, `fill` where a row number is behind the end."""
    return x[:, rows.clamp(max=x.shape[1] - 1)].masked_fill(rows >= x.shape[1], fill).transpose(0, 1)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """`[n, H, M, *]` to `[n, kv_heads, H / kv_heads * M, *]`: the query heads of one key head stand in one matrix."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _unfold(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def _probabilities(score: Tensor, lse: Tensor) -> Tensor:
    return (score - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()


def _diagonal_sums(x: Tensor) -> Tensor:
    """`[n, H, M, N]` to `[n, H, M + N - 1]`: sums over equal j - i, from 1 - M up. Plain adds in a fixed order."""
    m, n = x.shape[2:]
    padded = torch.nn.functional.pad(x.flip(2), (0, m)).flatten(2)
    return padded[..., : m * (m + n - 1)].unflatten(2, (m, m + n - 1)).sum(2)
