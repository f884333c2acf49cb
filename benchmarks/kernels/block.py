"""Block attention, with and without the fused rotary embedding, on a long-history batch: 1.4 M tokens, 1,152 samples.

Bytes are those of `opengem.kernels.block.cost`: forward 4 and backward 7 passes over `[T, H, D]`. The chunk offsets
that `varlen_attn` needs and the positions that the compiled rotations read are made outside of their time. `*_qkv`
starts from one buffer of q, k and v, as a projection gives it: its gradient is one buffer too, which unfused rotations
have to join. `window128_*` are sliding windows of the jagged flash attention beside what they stand between, blocks and
full attention, each of which computes something else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import Case, compiled
from opengem.kernels.block import cost
from opengem.kernels.block.op import block_attention
from opengem.kernels.jfa import cost as jfa_cost
from opengem.kernels.jfa.op import jagged_flash_attention
from opengem.kernels.rope import reference as rope_reference
from opengem.kernels.rope.op import apply_rope, rope_tables
from opengem.model.attention import SplitHeads

SAMPLES, LONGEST, FILL, HEADS, BLOCK, WINDOW = 1152, 4096, 0.3, 4, 64, 128


def lengths(samples: int = SAMPLES, longest: int = LONGEST, fill: float = FILL, seed: int = 0) -> Tensor:
    """int64 `[samples]`, uniform with mean `fill * longest`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, int(2 * fill * longest) + 1, (samples,), generator=generator).clamp(max=longest)


def with_offsets(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def row_positions(sizes: Tensor) -> Tensor:
    """int64 `[T]`: where each row stands in its sample."""
    return torch.arange(int(sizes.sum())) - with_offsets(sizes)[:-1].repeat_interleave(sizes)


def chunk_offsets(sample_lengths: Tensor, block: int = BLOCK) -> Tensor:
    """int32 offsets of the blocks taken as sequences of their own."""
    blocks = [min(block, n - first) for n in sample_lengths.tolist() for first in range(0, n, block)]
    return with_offsets(torch.tensor(blocks)).int()


def make(device: torch.device, seed: int, dim: int, sizes: Tensor) -> tuple:
    """q, k, v, offsets, cos, sin, chunk offsets, position of each row."""
    torch.manual_seed(seed)
    shape = int(sizes.sum()), HEADS, dim
    qkv = (torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    tables = rope_tables(LONGEST, dim, device=device)
    made = with_offsets(sizes), *tables, chunk_offsets(sizes), row_positions(sizes)
    return *qkv, *(x.to(device) for x in made)


def plain(q, k, v, offsets, cos, sin, chunks, position):
    return block_attention(q, k, v, offsets, max_length=LONGEST)


def fused(q, k, v, offsets, cos, sin, chunks, position):
    return block_attention(q, k, v, offsets, max_length=LONGEST, rope=(cos, sin))


def interleaved(q, k, v, offsets, cos, sin, chunks, position):
    return block_attention(q, k, v, offsets, max_length=LONGEST, rope=(cos, sin, True))


def pair(q, k, v, offsets, cos, sin, chunks, position):
    q, k = (apply_rope(x, offsets, cos, sin, max_length=LONGEST) for x in (q, k))
    return block_attention(q, k, v, offsets, max_length=LONGEST)


def rotated(q, k, cos, sin, position):
    cos, sin = cos[position].unsqueeze(1), sin[position].unsqueeze(1)
    return tuple(rope_reference.rotate(x.float(), cos, sin, False).to(x.dtype) for x in (q, k))


def compiled_pair(q, k, v, offsets, cos, sin, chunks, position):
    q, k = compiled(rotated)(q, k, cos, sin, position)
    return block_attention(q, k, v, offsets, max_length=LONGEST)


def make_qkv(device: torch.device, seed: int, dim: int, sizes: Tensor) -> tuple:
    """q, k and v in one buffer `[T, 3 H, D]`, and the rest as `make`."""
    q, k, v, *rest = make(device, seed, dim, sizes)
    return torch.cat([q, k, v], 1).detach().requires_grad_(), *rest


def fused_qkv(qkv, offsets, cos, sin, chunks, position):
    return fused(*SplitHeads.apply(qkv, 3), offsets, cos, sin, chunks, position)


def pair_qkv(qkv, offsets, cos, sin, chunks, position):
    both, v = qkv.split([2 * HEADS, HEADS], 1)
    both = apply_rope(both, offsets, cos, sin, max_length=LONGEST)
    return block_attention(*both.chunk(2, 1), v, offsets, max_length=LONGEST)


def compiled_pair_qkv(qkv, offsets, cos, sin, chunks, position):
    return compiled_pair(*qkv.chunk(3, 1), offsets, cos, sin, chunks, position)


def varlen(q, k, v, offsets, cos, sin, chunks, position):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, chunks, chunks, BLOCK, BLOCK)


def varlen_after_rope(q, k, v, offsets, cos, sin, chunks, position):
    q, k = compiled(rotated)(q, k, cos, sin, position)
    return varlen(q, k, v, offsets, cos, sin, chunks, position)


def window(q, k, v, offsets, cos, sin, chunks, position):
    return jagged_flash_attention(q, k, v, offsets, max_q=LONGEST, window=(WINDOW, WINDOW))


def full(q, k, v, offsets, cos, sin, chunks, position):
    return jagged_flash_attention(q, k, v, offsets, max_q=LONGEST)


def varlen_window(q, k, v, offsets, cos, sin, chunks, position):
    from torch.nn.attention.varlen import varlen_attn

    starts = offsets.int()
    return varlen_attn(q, k, v, starts, starts, LONGEST, LONGEST, window_size=(WINDOW, WINDOW))


def _case(name: str, dim: int, ours, peers: dict, positions: int, make=make) -> Case:
    sizes = lengths()
    rows, flops = int(sizes.sum()), cost.flops(sizes.tolist(), HEADS, dim)
    return Case(
        op="block", name=name, make=lambda device, seed: make(device, seed, dim, sizes), ours=ours, peers=peers,
        counted="bytes 4 T H D item; backward 7 T H D item" + ("; with RoPE fp32 tables once" if positions else ""),
        shape={"B": SAMPLES, "T": rows, "H": HEADS, "D": dim, "max": LONGEST, "fill": FILL, "block": BLOCK},
        fwd_flops=flops, bwd_flops=int(cost.BACKWARD_KERNEL * flops),
        fwd_bytes=cost.bytes(rows, HEADS, dim, positions=positions),
        bwd_bytes=cost.backward_bytes(rows, HEADS, dim, positions=positions))


def _window_case(name: str, sizes: Tensor) -> Case:
    rows, dim = int(sizes.sum()), 128
    flops = jfa_cost.flops(sizes.tolist(), sizes.tolist(), HEADS, dim, window=(WINDOW, WINDOW))
    return Case(
        op="block", name=name, make=lambda device, seed: make(device, seed, dim, sizes), ours=window,
        peers={"torch_varlen_fa2_window": varlen_window, "opengem_full": full, "opengem_block": plain},
        shape={"B": len(sizes), "T": rows, "H": HEADS, "D": dim, "max": LONGEST, "window": WINDOW},
        fwd_flops=flops, bwd_flops=int(cost.BACKWARD_KERNEL * flops), same_function=False)


def cases() -> list[Case]:
    rope_peers = {"opengem_unfused": pair, "torch_compile_rope_opengem_block": compiled_pair,
                  "torch_varlen_fa2_after_rope": varlen_after_rope}
    qkv_peers = {"opengem_unfused": pair_qkv, "torch_compile_rope_opengem_block": compiled_pair_qkv}
    longest = int(lengths().max())
    return [
        _case("block64_4096_fill.3", 128, plain, {"torch_varlen_fa2": varlen}, 0),
        _case("block64_rope_4096_fill.3", 128, fused, rope_peers, longest),
        _case("block64_rope_qkv_4096_fill.3", 128, fused_qkv, qkv_peers, longest, make_qkv),
        _case("block64_rope_interleaved_4096_fill.3", 128, interleaved, {}, longest),
        _case("block64_4096_fill.3_d64", 64, plain, {"torch_varlen_fa2": varlen}, 0),
        _case("block64_rope_4096_fill.3_d64", 64, fused, rope_peers, longest),
        _window_case("window128_4096_fill.3", lengths()),
        _window_case("window128_4096_full", torch.full((96,), LONGEST)),
    ]
