"""`block_attention`: softmax attention inside 64-token blocks, optionally with the rotary embedding fused in.

Half-way between full attention and pooling: cost is linear in the history's length, and no block sees another. Block
boundaries are counted from each sample's start. One block is one tile, so there is no online softmax, no log-sum-exp
in memory and no pass over the output in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from opengem.kernels import backend
from opengem.kernels.block import cost, reference
from opengem.kernels.custom_op import define
from opengem.kernels.jagged_ops.check import check_offsets, check_same
from opengem.kernels.rope.op import check_rope


def block_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, max_length: int, block: int = 64,
                    scale: float | None = None, rope: tuple | Tensor | None = None,
                    rope_by_row: bool = False) -> Tensor:
    """`softmax(scale * q k^T) v` where row i of a sample sees row j of it if `i // block == j // block`.

    q, k, v: `[T, H, D]`, same shape and dtype; strided views of a fused buffer are fine. offsets: int32 or int64
    `[B + 1]`. max_length: host bound of the sample lengths. scale: default `D ** -0.5`.
    rope: None, or (cos, sin) or (cos, sin, interleaved) as `apply_rope` takes them: q and k are rotated inside the
    kernel, and their gradients rotated back, without touching memory. The GPU kernel reads cos and sin as fp16; who
    calls with the same angles more than once gives what `pack_angles` made of them.
    rope_by_row: cos and sin `[T, D / 2]` have a row for each row of q instead of one for each position in a sample, as
    angles that depend on time need.
    Returns `[T, H, D]`, contiguous. Empty samples and an empty batch are ordinary. On a GPU, rows behind `offsets[-1]`
    give zero output and zero gradients; on a CPU they are an error.
    Raises ValueError naming the argument for wrong shapes, dtypes, devices or short tables.
    """
    _check(q, k, v, block)
    check_offsets("block_attention", offsets, q.shape[0], q.device, max_length)
    cos, sin, interleaved = _tables(rope, q, offsets, max_length, rope_by_row)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    return _forward(q, k, v, offsets, cos, sin, max_length, block, scale, interleaved, rope_by_row)


def pack_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 `[rows, D / 2]` each to int32 `[rows, D / 2]`, the form in which `block_attention` reads them (as fp16)."""
    if cos.is_cuda and backend.has_triton():
        from opengem.kernels.block import triton

        return triton.pack(cos, sin)
    return reference.pack(cos, sin)


def _check(q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"block_attention: q, k and v must share one shape [T, H, D], got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}; repeat the heads of k and v if there are fewer"
        )
    check_same("block_attention", q=q, k=k, v=v)
    if block < 1:
        raise ValueError(f"block_attention: block must be at least 1, got {block}")


def _tables(rope: tuple | None, q: Tensor, offsets: Tensor, max_length: int,
            by_row: bool) -> tuple[Tensor, Tensor, bool]:
    if rope is None:
        none = q.new_empty((0, q.shape[2] // 2), dtype=torch.float32)
        return none, none, False
    if isinstance(rope, Tensor):
        wanted, half = q.shape[0] if by_row else max_length, q.shape[2] // 2
        if rope.dtype != torch.int32 or rope.shape[1:] != (half,) or rope.shape[0] < wanted:
            raise ValueError(f"block_attention: packed angles must be int32, at least [{wanted}, {half}], got "
                             f"{rope.dtype} {list(rope.shape)}; make them with pack_angles")  # fmt: skip
        return rope, rope[:0], False
    if len(rope) not in (2, 3):
        raise ValueError(f"block_attention: rope must be (cos, sin) or (cos, sin, interleaved), got {len(rope)} items")
    cos, sin, interleaved = (*rope, False)[:3]
    check_rope("block_attention", offsets, cos, sin, q.shape[2], None if by_row else max_length)
    if by_row and cos.shape[0] != q.shape[0]:
        raise ValueError(f"block_attention: rope_by_row needs {q.shape[0]} rows of cos and sin, got {cos.shape[0]}")
    return cos, sin, bool(interleaved)


def _implementation(q: Tensor, block: int):
    kind = backend.implementation("block", q.device, dtype=q.dtype, head_dim=q.shape[2], block=block)
    if kind == "reference":
        return reference
    if kind == "triton":
        from opengem.kernels.block import triton

        return triton
    from opengem.kernels.block import gluon_sm90

    return gluon_sm90


def _run_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, max_length: int,
                 block: int, scale: float, interleaved: bool, by_row: bool) -> Tensor:
    run = _implementation(q, block).block_forward
    return run(q, k, v, offsets, cos, sin, max_length, block, scale, interleaved, by_row)


def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
                  max_length: int, block: int, scale: float, interleaved: bool,
                  by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    run = _implementation(q, block).block_backward
    return run(grad, q, k, v, offsets, cos, sin, max_length, block, scale, interleaved, by_row)


def _fake_forward(q, *_):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _fake_backward(grad, q, k, v, *_):
    return reference.side_by_side(q, q.shape[0])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _gradient(ctx, grad):
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 8


_forward = define("block_fwd", _run_forward, _fake_forward, _save, _gradient)
_backward = define("block_bwd", _run_backward, _fake_backward)


@register_flop_formula(torch.ops.opengem.block_fwd, get_raw=True)
def _forward_flops(q, k, v, offsets, cos, sin, max_length, block, *args, out_val=None, **kwargs) -> int:
    return cost.flops(offsets.diff().tolist(), q.shape[1], q.shape[2], block=block)


@register_flop_formula(torch.ops.opengem.block_bwd, get_raw=True)
def _backward_flops(grad, q, k, v, offsets, cos, sin, max_length, block, *args, out_val=None, **kwargs) -> int:
    return int(cost.BACKWARD_MFU * cost.flops(offsets.diff().tolist(), q.shape[1], q.shape[2], block=block))
