"""The chained norms' kernels against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

from __future__ import annotations

import pytest
import torch

from opengem.kernels.chain import reference
from tests.kernels.interpret import DEVICE, DTYPES, close_to, needs_kernels


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_total", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(0, 32), (37, 64), (5, 24), (3, 1000)])
def test_kernels_match_the_reference(rows, width, has_total, dtype, poisoned_empty):
    from opengem.kernels.chain import triton

    inputs = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(5)]
    grads = inputs[0], inputs[1] if has_total else None
    for name, arguments in (("forward", inputs[:3]), ("backward", [*grads, *inputs[2:4]])):
        exact = getattr(reference, name)(*(None if x is None else x.double() for x in arguments))
        found = zip(getattr(triton, name)(*arguments), exact, getattr(reference, name)(*arguments), strict=True)
        for got, wanted, plain in found:
            close_to(got, wanted, plain)
