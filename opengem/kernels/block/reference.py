"""Definition of block attention, forward and backward, in plain PyTorch: padded tiles, a bounded number at a time.

Block j of a sample holds its rows [j * block, (j + 1) * block); a row attends to the rows of its own block. Sample b
takes tiles from `offsets[b] // block + b` on, which is always enough room, so the tiling needs no running sum of block
counts and no host sync. The fast version, `triton.py`, uses the same tiling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opengem.kernels.rope.reference import rotate

SCORE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # scores held at a time: what a cache holds, what hides launches


def pack(cos: Tensor, sin: Tensor) -> Tensor:
    """int32 like cos: cos in the low and sin in the high half of a word, both fp16."""
    low, high = (x.half().view(torch.int16).to(torch.int32) for x in (cos, sin))
    return high << 16 | low & 0xFFFF


def unpack(turns: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(half.to(torch.int16).view(torch.float16) for half in (turns, turns >> 16))


def tiles(offsets: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first row, live rows, position of the first row in its sample), int64 `[tiles]`; spare tiles hold no row."""
    batch = offsets.shape[0] - 1
    offsets = offsets.long()
    first_tile = offsets[:-1] // block + torch.arange(batch, device=offsets.device)
    tile = torch.arange(rows // block + batch, device=offsets.device)
    sample = (torch.searchsorted(first_tile, tile, right=True) - 1).clamp_(min=0)
    position = (tile - first_tile[sample]) * block
    first = offsets[sample] + position
    return first, (offsets[sample + 1] - first).clamp(0, block), position


class _Chunk:
    """A run of tiles: gathers rows into `[tiles, H, width, D]`, scatters them back, and knows which cells are live."""

    def __init__(self, first: Tensor, live: Tensor, position: Tensor, width: int, rows: int):
        slot = torch.arange(width, device=first.device)
        self.live = slot < live[:, None]
        self.row = torch.where(self.live, first[:, None] + slot, rows)
        self.position = position[:, None] + slot
        self.rows = rows

    def gather(self, x: Tensor, wide: torch.dtype) -> Tensor:
        tile = x[self.row.clamp(max=self.rows - 1)].to(wide)
        return tile.masked_fill_(~self.live[:, :, None, None], 0).transpose(1, 2)

    def scatter(self, tile: Tensor, out: Tensor) -> None:
        """Write live cells into `out`, whose extra last row takes the others."""
        out.index_copy_(0, self.row.flatten(), tile.transpose(1, 2).flatten(0, 1).to(out.dtype))

    def angles(self, cos: Tensor, sin: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = unpack(cos) if cos.dtype == torch.int32 else (cos, sin)
        position = self.position.clamp(max=cos.shape[0] - 1)
        return cos.to(wide)[position, :].unsqueeze(1), sin.to(wide)[position, :].unsqueeze(1)

    def probabilities(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        scores = (q @ k.transpose(2, 3)).mul_(scale)
        dead = ~self.live[:, None, None, :]
        return torch.softmax(scores.masked_fill_(dead, -torch.inf), -1).masked_fill_(dead, 0)


def _chunks(offsets: Tensor, rows: int, heads: int, max_length: int, block: int, by_row: bool) -> Iterator[_Chunk]:
    first, live, position = tiles(offsets, rows, block)
    position = first if by_row else position
    if offsets.device.type == "cpu":  # unused tiles can be dropped where reading them costs no sync
        used = live > 0
        first, live, position = first[used], live[used], position[used]
    width = min(block, max_length)
    step = max(1, SCORE_ELEMENTS.get(offsets.device.type, 1 << 24) // (heads * width * width))
    for start in range(0, first.shape[0], step):
        part = slice(start, start + step)
        yield _Chunk(first[part], live[part], position[part], width, rows)


def side_by_side(q: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of q, k and v in one `[rows, 3, H, D]`: what split one buffer need not join them."""
    return q.new_empty(rows, 3, *q.shape[1:]).unbind(1)


def _empty(offsets: Tensor, rows: int, max_length: int) -> bool:
    return rows == 0 or offsets.shape[0] == 1 or max_length == 0


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                  block: int, scale: float, interleaved: bool, by_row: bool) -> Tensor:
    """`[T, H, D]`. `cos` and `sin` with no rows mean no rotation."""
    rows, heads, _ = q.shape
    out = q.new_zeros((rows + 1, *q.shape[1:]))
    if _empty(offsets, rows, max_length):
        return out[:rows]
    wide = torch.promote_types(q.dtype, torch.float32)
    for chunk in _chunks(offsets, rows, heads, max_length, block, by_row):
        tile_q, tile_k, tile_v = (chunk.gather(x, wide) for x in (q, k, v))
        if cos.shape[0]:
            angles = chunk.angles(cos, sin, wide)
            tile_q, tile_k = rotate(tile_q, *angles, interleaved), rotate(tile_k, *angles, interleaved)
        chunk.scatter(chunk.probabilities(tile_q, tile_k, scale) @ tile_v, out)
    return out[:rows]


def block_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                   max_length: int, block: int, scale: float, interleaved: bool,
                   by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v; probabilities are computed again, a whole softmax row lies in one tile."""
    rows, heads, _ = q.shape
    outs = [out.zero_() for out in side_by_side(q, rows + 1)]
    if _empty(offsets, rows, max_length):
        return outs[0][:rows], outs[1][:rows], outs[2][:rows]
    wide = torch.promote_types(q.dtype, torch.float32)
    for chunk in _chunks(offsets, rows, heads, max_length, block, by_row):
        tile_q, tile_k, tile_v, tile_grad = (chunk.gather(x, wide) for x in (q, k, v, grad))
        angles = chunk.angles(cos, sin, wide) if cos.shape[0] else None
        if angles:
            tile_q, tile_k = rotate(tile_q, *angles, interleaved), rotate(tile_k, *angles, interleaved)
        p = chunk.probabilities(tile_q, tile_k, scale)
        dp = tile_grad @ tile_v.transpose(2, 3)
        ds = (dp - (p * dp).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq, dk, dv = ds @ tile_k, ds.transpose(2, 3) @ tile_q, p.transpose(2, 3) @ tile_grad
        if angles:
            dq, dk = rotate(dq, angles[0], -angles[1], interleaved), rotate(dk, angles[0], -angles[1], interleaved)
        for tile, out in zip((dq, dk, dv), outs, strict=True):
            chunk.scatter(tile, out)
    return outs[0][:rows], outs[1][:rows], outs[2][:rows]
