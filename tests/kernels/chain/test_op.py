"""Two chained norms are the two norms, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opengem.kernels.chain.op import chained_norms


@pytest.mark.parametrize("used", ["y", "total", "both"])
@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (3, 1)])
def test_is_both_norms_after_each_other(shape, used):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]

    def apart(x, inner, outer):
        total = outer + F.rms_norm(x + inner, shape[1:], eps=1e-5)
        return F.layer_norm(total, shape[1:]), total

    found = []
    for function in (chained_norms, apart):
        y, total = function(*inputs)
        parts = {"y": (y * weights[0]).sum(), "total": (total * weights[1]).sum()}
        loss = sum(parts.values()) if used == "both" else parts[used]
        found.append([y, total, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*found)


def test_is_what_torch_asks_of_an_op_and_says_what_it_wants():
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(torch.ops.opengem.chain_fwd.default, inputs)
    with pytest.raises(ValueError, match=r"must be \[T, d\] alike"):
        chained_norms(torch.randn(4, 8), torch.randn(4, 8), torch.randn(3, 8))
