"""`apply_rope`: rotary position embedding for jagged queries and keys.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding". Both pairings in use are offered: (i,
i + D/2) as in GPT-NeoX, and (2i, 2i + 1) as in the paper. Block attention applies the same inside its kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.jagged_ops.check import check_offsets, host_readable
from opengem.kernels.rope import reference


def rope_tables(positions: int, head_dim: int, *, base: float = 10_000.0,
                device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin), each fp32 `[positions, head_dim / 2]`; position p turns pair i by `p * base ** (-2 i / head_dim)`.

    Angles are computed in fp64, so that position 65,535 is as exact as position 1.
    """
    if head_dim % 2:
        raise ValueError(f"rope_tables: head_dim must be even, got {head_dim}")
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
               max_length: int | None = None) -> Tensor:
    """Rotate every row of `x` by the angles of its position inside its sample.

    x: `[T, H, D]`, D even, any floating dtype, strided views welcome. offsets: int32 or int64 `[B + 1]`.
    cos, sin: fp32 `[P, D/2]`, row p for position p; P may exceed the longest sample. No gradient flows into them.
    max_length: host bound of the sample lengths; where offsets lie on a GPU it is what tells whether the tables are
    long enough. Without it a row past the end of the tables comes back as NaN on a GPU.
    Returns `[T, H, D]`, contiguous, same dtype. An empty `x` gives an empty result.
    Raises ValueError for wrong shapes, dtypes or devices, and for tables shorter than the longest sample.
    """
    check_rope("apply_rope", offsets, cos, sin, x.shape[-1] if x.dim() == 3 else 0, max_length)
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"apply_rope: x must be floating point [T, H, D], got {x.dtype} {list(x.shape)}")
    check_offsets("apply_rope", offsets, x.shape[0], x.device, max_length)
    return _rope(x, offsets, cos, sin, interleaved, False)


def check_rope(op: str, offsets: Tensor, cos: Tensor, sin: Tensor, head_dim: int, max_length: int | None) -> None:
    """ValueError unless `cos` and `sin` fit heads of `head_dim` and the longest sample as far as the host knows it."""
    if head_dim < 2 or head_dim % 2 or cos.dim() != 2 or cos.shape[1] != head_dim // 2 or sin.shape != cos.shape:
        raise ValueError(
            f"{op}: cos and sin must be [positions, D/2] for an even head dim, got {list(cos.shape)} and "
            f"{list(sin.shape)} for D = {head_dim}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"{op}: cos and sin must be float32, got {cos.dtype} and {sin.dtype}; use .float()")
    if cos.device != offsets.device or sin.device != offsets.device:
        raise ValueError(f"{op}: cos is on {cos.device}, sin on {sin.device}, offsets on {offsets.device}")
    longest = max_length
    if host_readable(offsets) and offsets.shape[0] > 1:
        longest = int(offsets.diff().max())
    if longest is not None and cos.shape[0] < longest:
        raise ValueError(
            f"{op}: cos and sin have {cos.shape[0]} positions, the longest sample may have {longest}; "
            f"make tables with rope_tables({longest}, {head_dim})"
        )


def _run(x: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    kind = backend.implementation("rope", x.device, dtype=x.dtype, head_dim=x.shape[2])
    if kind == "reference":
        return reference.rope(x, offsets, cos, sin, interleaved, inverse)
    from opengem.kernels.rope import triton

    return triton.rope(x, offsets, cos, sin, interleaved, inverse)


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    _, offsets, cos, sin, interleaved, inverse = inputs
    ctx.save_for_backward(offsets, cos, sin)
    ctx.interleaved, ctx.inverse = interleaved, inverse


def _gradient(ctx, grad):
    return _rope(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), None, None, None, None, None


_rope = define("rope", _run, _fake, _save, _gradient)
