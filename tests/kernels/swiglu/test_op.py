"""SwiGLU against torch in fp64."""

import pytest
import torch
import torch.nn.functional as F

from opengem.kernels.swiglu import cost
from opengem.kernels.swiglu.op import swiglu


@pytest.mark.parametrize("shape", [(0, 8), (3, 10), (2, 5, 64)])
def test_forward_and_backward(shape, poisoned_empty):
    x = (torch.randn(shape) * 3).requires_grad_()
    gate, up = x.double().chunk(2, -1)
    want = F.silu(gate) * up
    got = swiglu(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    seed = torch.randn_like(got)
    a, = torch.autograd.grad(got, x, seed)
    b, = torch.autograd.grad(want, x, seed.double())
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_large_gates_gradcheck_opcheck_errors_and_bytes():
    x = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], requires_grad=True)
    out = swiglu(x)
    assert out.tolist() == [[0.0, 600.0]]
    assert bool(torch.autograd.grad(out.sum(), x)[0].isfinite().all())
    leaf = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, leaf)
    torch.library.opcheck(torch.ops.opengem.swiglu_fwd, (leaf,))
    assert swiglu(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="2 F"):
        swiglu(torch.zeros(2, 3))
    assert (cost.bytes(2, 3), cost.backward_bytes(2, 3)) == (36, 60)


def test_only_the_input_is_kept_for_backward():
    saved = []
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        swiglu(x)
    assert saved == [32]
