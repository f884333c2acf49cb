"""GDPA cases: the shapes of the public GDPA benchmark (B=1152, H=4, D=128) and pooling by 32 seeds (B=512).

`ours` computes GELU in its tanh form, one MUFU instruction a score, as the public kernels do; cases that end in the
name of an activation differ in nothing else. Peers that apply softmax do the same products on the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.registry import Case
from opengem.kernels.gdpa import cost, gdpa

HEADS, DIM = 4, 128
SCALE = 1 / math.sqrt(DIM)
PADDED_LIMIT = 20e9  # bytes of one tensor of scores beyond which the padded formula is not tried


def cases() -> list[Case]:
    found = []
    for fill, label in ((1.0, "1"), (0.5, ".5")):
        for size in (256, 512, 1024, 2048):
            found.append(_attention(f"gdpa_self{size}_fill{label}", 1152, size, size, fill))
    for size in (256, 512, 1024, 2048):
        found.append(_attention(f"gdpa_cross{size}x256_fill.5", 1152, size, 256, 0.5, cross=True))
    found.append(_pooling("pma32x2048_fill.5", 512, 32, 2048, 0.5))
    for activation in ("gelu", "gelu_poly", "silu"):
        found.append(_attention(f"gdpa_self1024_fill.5_{activation}", 1152, 1024, 1024, 0.5, activation=activation))
        name = f"gdpa_cross1024x256_fill.5_{activation}"
        found.append(_attention(name, 1152, 1024, 256, 0.5, cross=True, activation=activation))
    return found


def lengths(batch: int, longest: int, fill: float) -> list[int]:
    """All `longest` at fill 1, else uniform over 0..longest (mean fill .5), the same in every run."""
    if fill == 1.0:
        return [longest] * batch
    return torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(0)).tolist()


def _attention(
    name: str, batch: int, max_q: int, max_kv: int, fill: float, cross: bool = False, activation: str = "gelu_tanh"
) -> Case:
    q_lengths = lengths(batch, max_q, fill)
    kv_lengths = [max_kv] * batch if cross else q_lengths
    work = cost.flops(q_lengths, kv_lengths, HEADS, DIM)
    options = {"max_q": max_q, "max_kv": max_kv, "activation": activation, "scale": SCALE}
    return Case(
        op="gdpa", name=name,
        shape={"B": batch, "H": HEADS, "D": DIM, "max_q": max_q, "max_kv": max_kv, "fill": fill},
        make=partial(_inputs, q_lengths, kv_lengths, 0),
        ours=lambda q, k, v, qo, ko: gdpa(q, k, v, qo, ko, **options),
        peers=_peers(max_q, max_kv, 0),
        fwd_flops=work, bwd_flops=int(cost.BACKWARD_KERNEL * work),
        fwd_bytes=cost.bytes(q_lengths, kv_lengths, HEADS, DIM),
        bwd_bytes=cost.bytes(q_lengths, kv_lengths, HEADS, DIM, backward=True),
        same_function=False,
    )


def _pooling(name: str, batch: int, seeds: int, max_kv: int, fill: float) -> Case:
    q_lengths, kv_lengths = [seeds] * batch, lengths(batch, max_kv, fill)
    work = cost.flops(q_lengths, kv_lengths, HEADS, DIM)
    options = {"max_q": seeds, "max_kv": max_kv, "activation": "gelu_tanh", "scale": SCALE, "shared_q": True}
    return Case(
        op="gdpa", name=name, shape={"B": batch, "H": HEADS, "D": DIM, "seeds": seeds, "max_kv": max_kv, "fill": fill},
        make=partial(_inputs, q_lengths, kv_lengths, seeds),
        ours=lambda q, k, v, qo, ko: gdpa(q, k, v, None, ko, **options),
        peers=_peers(seeds, max_kv, batch),
        fwd_flops=work, bwd_flops=int(cost.BACKWARD_KERNEL * work),
        fwd_bytes=cost.bytes(q_lengths, kv_lengths, HEADS, DIM, shared_q=True),
        bwd_bytes=cost.bytes(q_lengths, kv_lengths, HEADS, DIM, shared_q=True, backward=True),
        same_function=False,
    )


def _inputs(q_lengths: list[int], kv_lengths: list[int], seeds: int, device: torch.device, seed: int) -> tuple:
    """(q, k, v, q_offsets, kv_offsets): random normal bf16 leaves; q is `[seeds, H, D]` if there are seeds."""
    generator = torch.Generator(device).manual_seed(seed)

    def leaf(rows: int) -> Tensor:
        values = torch.randn(rows, HEADS, DIM, device=device, generator=generator, dtype=torch.float32)
        return values.bfloat16().requires_grad_()

    def offsets(rows: list[int]) -> Tensor:
        return torch.tensor([0, *rows]).cumsum(0).to(device)

    q, k, v = leaf(seeds or sum(q_lengths)), leaf(sum(kv_lengths)), leaf(sum(kv_lengths))
    return q, k, v, offsets(q_lengths), offsets(kv_lengths)


# ---- peers: `batch` > 0 means that q is shared and has to be repeated for them -------------------------------------


def _peers(max_q: int, max_kv: int, batch: int) -> dict[str, Callable]:
    build = {"torch_varlen_fa2": _varlen, "fa4_cute": _fa4, "padded_bmm_gelu_compiled": _padded}
    return {name: _lazily(partial(make, max_q, max_kv, batch)) for name, make in build.items()}


def _lazily(make: Callable[[], Callable]) -> Callable:
    """A function that imports and builds its peer at the first call."""
    built: list[Callable] = []

    def run(*inputs: Tensor) -> Tensor:
        if not built:
            built.append(make())
        return built[0](*inputs)

    return run


def _repeated(q: Tensor, batch: int) -> Tensor:
    return q.repeat(batch, 1, 1) if batch else q


def _varlen(max_q: int, max_kv: int, batch: int) -> Callable:
    from torch.nn.attention.varlen import varlen_attn

    def run(q, k, v, qo, ko):
        return varlen_attn(_repeated(q, batch), k, v, qo.int(), ko.int(), max_q, max_kv)

    return run


def _fa4(max_q: int, max_kv: int, batch: int) -> Callable:
    from flash_attn.cute import flash_attn_varlen_func

    def run(q, k, v, qo, ko):
        out = flash_attn_varlen_func(
            _repeated(q, batch), k, v, cu_seqlens_q=qo.int(), cu_seqlens_k=ko.int(), max_seqlen_q=max_q,
            max_seqlen_k=max_kv,
        )
        return out[0] if isinstance(out, tuple) else out

    return run


def _padded(max_q: int, max_kv: int, batch: int) -> Callable:
    from torch._functorch import config

    config.donated_buffer = False  # the backward is timed several times

    def pad(x: Tensor, offsets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(size, device=x.device)
        live = position < offsets.diff()[:, None]
        rows = (offsets[:-1, None] + position).clamp(max=x.shape[0] - 1)
        return torch.where(live[:, :, None, None], x[rows], 0).transpose(1, 2), live

    @torch.compile(dynamic=False)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(q @ k.mT * SCALE, approximate="tanh") @ v

    def run(q, k, v, qo, ko):
        scores = (len(ko) - 1) * HEADS * max_q * max_kv * 2
        if scores > PADDED_LIMIT:
            raise RuntimeError(f"padded scores would take {scores / 1e9:.0f} GB, several times")
        qp, live = pad(_repeated(q, batch), qo, max_q)
        out = attend(qp, pad(k, ko, max_kv)[0], pad(v, ko, max_kv)[0])
        return out.transpose(1, 2)[live]

    return run
