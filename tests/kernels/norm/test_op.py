"""Norms against torch's own in fp64, the fused residual and quantisation against their unfused pairs."""

import pytest
import torch
import torch.nn.functional as F

from opengem.kernels.mx.op import quantize_mx
from opengem.kernels.norm import cost
from opengem.kernels.norm.op import layer_norm, layer_norm_on, rms_norm

OURS = {"rms": rms_norm, "layer": layer_norm}
THEIRS = {"rms": lambda x, w, b, eps: F.rms_norm(x, x.shape[-1:], w, eps) + (0 if b is None else b),
          "layer": lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps)}


def leaves(rows, width, affine, dtype=torch.float32):
    parts = [torch.randn(rows, width) * 3 + 1, torch.randn(rows, width)]
    parts += [torch.randn(width), torch.randn(width)] if affine else []
    return [p.to(dtype).requires_grad_() for p in parts]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_forward_and_backward_match_torch(rows, kind, affine, residual, poisoned_empty):
    ours = leaves(rows, 40, affine)
    exact = [p.detach().double().requires_grad_() for p in ours]
    (x, r, *wb), (x64, r64, *wb64) = ours, exact
    total = x64 + r64 if residual else x64
    want = THEIRS[kind](total, *(wb64 or (None, None)), 1e-5)
    got = OURS[kind](x, *(wb or (None, None)), residual=r if residual else None)
    y, h = got if residual else (got, x)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.double(), total, rtol=1e-6, atol=1e-6)
    seeds = torch.randn(2, rows, 40)
    used = [0, 1, 2, 3] if residual else [0, 2, 3]
    used = [i for i in used if i < len(ours)]
    a = torch.autograd.grad((y * seeds[0]).sum() + (h * seeds[1]).sum(), [ours[i] for i in used])
    b = torch.autograd.grad((want * seeds[0]).sum() + (total * seeds[1]).sum(), [exact[i] for i in used])
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_a_norm_that_hands_its_input_on_adds_both_gradients(used):
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def loss(normed, handed):
        return sum(part.sin().sum() for part, wanted in zip((normed, handed), used, strict=True) if wanted)

    (got,), (want,) = (torch.autograd.grad(loss(*pair), [x]) for pair in (layer_norm_on(x), (layer_norm(x), x)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradcheck(kind):
    x, r, w, b = leaves(3, 6, True, torch.float64)
    assert torch.autograd.gradcheck(lambda *a: OURS[kind](a[0], a[2], a[3], residual=a[1]), (x, r, w, b))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_leading_dimensions_fp32_weights_and_a_zero_row(kind):
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    x[0, 0] = 0
    y = OURS[kind](x, torch.ones(16))
    assert y.shape == x.shape and y.dtype == torch.bfloat16 and bool((y[0, 0] == 0).all())
    torch.testing.assert_close(y.float(), THEIRS[kind](x.float(), None, None, 1e-5), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_quantised_output_equals_the_unfused_pair_and_passes_gradients_through(kind):
    x, r, w, b = leaves(40, 70, True)
    fused, h = OURS[kind](x, w, b, residual=r, quantize="e4m3")
    pair = quantize_mx(OURS[kind](x, w, b, residual=r)[0])
    assert torch.equal(fused.data.view(torch.uint8), pair.data.view(torch.uint8))
    assert torch.equal(fused.scale, pair.scale) and torch.equal(h, x + r)
    seed = torch.randn(40, 70)
    straight = torch.autograd.grad(fused.dequantize(), [x, r, w, b], seed)
    plain = torch.autograd.grad(OURS[kind](x, w, b, residual=r)[0], [x, r, w, b], seed)
    for p, q in zip(straight, plain, strict=True):
        torch.testing.assert_close(p, q)


def test_errors_name_the_argument():
    x = torch.randn(4, 8)
    for change, message in [
        ({"weight": torch.ones(7)}, "weight must be"), ({"bias": torch.ones(8, 1)}, "bias must be"),
        ({"residual": x.double()}, "residual is torch.float64"), ({"residual": x[:2]}, "residual must have"),
        ({"quantize": "int8"}, "quantize must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            rms_norm(x, **change)
    with pytest.raises(ValueError, match="N >= 1"):
        layer_norm(torch.zeros(3, 0))


def test_opcheck_and_compile():
    x, r, w, b = leaves(33, 64, True)
    torch.library.opcheck(torch.ops.opengem.norm_fwd, (x, r, w, b, 1e-5, True))
    torch.library.opcheck(torch.ops.opengem.norm_fwd, (x, None, None, None, 1e-5, False))
    compiled = torch.compile(lambda x, r, w: rms_norm(x, w, residual=r), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, r, w), rms_norm(x, w, residual=r), strict=True):
        torch.testing.assert_close(got, want)


def test_bytes():
    assert cost.bytes(64, 64) == 2 * 64 * 64 * 2
    assert cost.bytes(64, 64, residual=True) == 4 * 64 * 64 * 2
    assert cost.bytes(33, 64, quantize=True) == 3 * 33 * 64 + 2 * 2
    assert cost.backward_bytes(64, 64, residual=True) == 4 * 64 * 64 * 2
