"""`swiglu`: `silu(gate) * up` (Shazeer, "GLU Variants Improve Transformer") on one fused projection output.

Only the input is kept for the backward; `silu(gate)` is computed again. Gate and up come as the two halves of one
tensor, so that one product makes them and one gradient tensor goes back into it without a concatenation.
"""

from __future__ import annotations

from torch import Tensor

from opengem.kernels import backend
from opengem.kernels.custom_op import define
from opengem.kernels.swiglu import reference


def swiglu(x: Tensor) -> Tensor:
    """`silu(x[..., :F]) * x[..., F:]`: `[..., 2 F]` to `[..., F]`, same dtype, computed in fp32 or wider.

    An empty x gives an empty result. Raises ValueError if the last dimension is odd or x is not floating point.
    """
    if x.dim() < 1 or x.shape[-1] % 2 or not x.is_floating_point():
        raise ValueError(f"swiglu: x must be floating point [..., 2 F] (gate, then up), got {x.dtype} {list(x.shape)}")
    return _swiglu_fwd(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], x.shape[-1] // 2)


def _implementation(x: Tensor):
    if backend.implementation("swiglu", x.device, dtype=x.dtype) == "reference":
        return reference
    from opengem.kernels.swiglu import triton

    return triton


def _run_forward(x: Tensor) -> Tensor:
    return _implementation(x).swiglu_forward(x)


def _run_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _implementation(x).swiglu_backward(grad, x)


def _fake_forward(x):
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _fake_backward(grad, x):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad):
    return _swiglu_bwd(grad, *ctx.saved_tensors)


_swiglu_fwd = define("swiglu_fwd", _run_forward, _fake_forward, _save, _gradient)
_swiglu_bwd = define("swiglu_bwd", _run_backward, _fake_backward)
