"""Cases of jagged flash attention and its public peers, on the same inputs in the same process.

`log-normal 2048`: 256 samples, median 930, sigma 0.6, clamped to 1 ... 2048 (mean fill .49). `uniform 1024`: 256
samples, 1 ... 1024. `swa128`: 1152 samples, 0 ... 2457 rows (fill .30 of 4096), keys within 128 rows on either side.
Four heads everywhere.
FlexAttention's block mask is built once, outside the timing, and as it compiles for half a minute a case, it is a peer
of log-normal 2048 at D=128 alone; the padded peer pays for padding and for taking it off.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.registry import Case, compiled
from opengem.kernels.jfa import cost
from opengem.kernels.jfa.op import jagged_flash_attention

HEADS = 4


@dataclass(frozen=True)
class Mask:
    """The causal flag or the window of a case."""

    causal: bool = False
    window: tuple[int, int] | None = None


def cases() -> list[Case]:
    out = []
    for dim in (128, 64):
        for causal in (False, True):
            mask, tail = Mask(causal), f"d{dim}_{'causal' if causal else 'full'}"
            out.append(_case(f"jfa_lognormal2048_{tail}", lognormal_lengths(), 2048, dim, mask))
            out.append(_case(f"jfa_uniform1024_{tail}", uniform_lengths(256, 1, 1024), 1024, dim, mask))
    out.append(_case("swa128_4096_fill.3", uniform_lengths(1152, 0, 2457), 4096, 128, Mask(window=(128, 128))))
    return out


def lognormal_lengths() -> list[int]:
    noise = torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (930 * (0.6 * noise).exp()).round().clamp(1, 2048).long().tolist()


def uniform_lengths(batch: int, low: int, high: int) -> list[int]:
    return torch.randint(low, high + 1, (batch,), generator=torch.Generator().manual_seed(0)).tolist()


def _case(name: str, lengths: list[int], most: int, dim: int, mask: Mask) -> Case:
    def ours(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return jagged_flash_attention(q, k, v, offsets, max_q=most, causal=mask.causal, window=mask.window)

    rows = sum(lengths)
    peers = PEERS if dim == 128 and most == 2048 else PEERS[:-1]
    flops = cost.flops(lengths, lengths, HEADS, dim, causal=mask.causal, window=mask.window)
    return Case(
        op="jfa", name=name,
        shape={"batch": len(lengths), "rows": rows, "max": most, "heads": HEADS, "head_dim": dim, "dtype": "bf16",
               "causal": mask.causal, "window": mask.window},
        make=functools.partial(make_inputs, lengths, dim), ours=ours,
        peers={peer.__name__: functools.partial(peer, most, mask) for peer in peers},
        fwd_flops=flops, bwd_flops=cost.backward_flops(flops),
        fwd_bytes=cost.bytes(rows, rows, HEADS, HEADS, dim),
        bwd_bytes=cost.bytes(rows, rows, HEADS, HEADS, dim, backward=True), tolerance=1e-2,
        unlike=("sdpa_cudnn_padded",))


def make_inputs(lengths: list[int], dim: int, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q, k, v (bf16 leaves, random normal) and int32 offsets."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = sum(lengths), HEADS, dim
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
               for _ in range(3))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return q, k, v, offsets


# ---- peers -----------------------------------------------------------------------------------------------------


def torch_varlen_fa2(most: int, mask: Mask, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = mask.window or (-1, 0 if mask.causal else -1)
    return varlen_attn(q, k, v, offsets, offsets, most, most, window_size=window)


def fa4_cute(most: int, mask: Mask, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=most, max_seqlen_k=most, causal=mask.causal,
        window_size=mask.window or (None, None))
    return out[0] if isinstance(out, tuple) else out


def sdpa_cudnn_padded(most: int, mask: Mask, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """cuDNN on padded input, padding keys not masked: its time is comparable, its output is not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if mask.window:
        raise ImportError("cuDNN SDPA takes no window")
    rows = _padded_rows(offsets, most)
    valid = rows < q.shape[0]
    padded = (x[rows.clamp(max=q.shape[0] - 1)].transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*padded, is_causal=mask.causal)
    return out.transpose(1, 2)[valid]


def flex_attention(most: int, mask: Mask, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    attention, _ = _flex()
    block_mask = _document_mask(_Key(offsets), mask, q.shape[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, block_mask=block_mask)[0].transpose(0, 1)


PEERS = (torch_varlen_fa2, fa4_cute, sdpa_cudnn_padded, flex_attention)


def _padded_rows(offsets: Tensor, most: int) -> Tensor:
    """`[B, most]` row numbers; the number of rows where there is none."""
    step = torch.arange(most, device=offsets.device)
    return torch.where(step < offsets.diff()[:, None], offsets[:-1, None] + step, offsets[-1])


@functools.cache
def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return compiled(flex_attention), torch.compile(create_block_mask)


class _Key:
    """Lets a tensor be a cache key by identity."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return self.tensor is other.tensor

    def __hash__(self):
        return id(self.tensor)


@functools.lru_cache(maxsize=1)
def _document_mask(key: _Key, mask: Mask, rows: int):
    offsets = key.tensor
    sample = torch.searchsorted(offsets, torch.arange(rows, device=offsets.device), right=True)
    left, right = cost.normalise_window(mask.causal, mask.window)

    def visible(batch, head, i, j):
        seen = sample[i] == sample[j]
        if left >= 0:
            seen = seen & (j - i >= -left)
        if right >= 0:
            seen = seen & (j - i <= right)
        return seen

    return _flex()[1](visible, None, None, rows, rows, device=offsets.device)
