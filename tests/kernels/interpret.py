"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter on the CPU, in fp32.

The interpreter has to be chosen before triton is imported, so `test_interpreted.py` starts a second pytest with
TRITON_INTERPRET=1; in an ordinary run on a CPU the marked tests are skipped.
"""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1")

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32]


def close_to(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Assert the kernel errs no more than twice as much as the same formula in plain torch of its dtype.

    got: the kernel's result; exact: fp32 or fp64 truth; plain: the reference run in the dtype of `got`. In fp32
    (interpreter) this is an ordinary comparison.
    """
    exact = exact.to(got.device, torch.float64)
    if got.dtype == torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=2e-5)
        return
    error = (got.double() - exact).abs().max() if got.numel() else 0
    allowed = (plain.double() - exact).abs().max() if got.numel() else 0
    step = torch.finfo(got.dtype).eps * (exact.abs().max() if got.numel() else 0)
    assert error <= 2 * allowed + step, f"largest error {error:.3g}, allowed 2 x {allowed:.3g} + {step:.3g}"


def capture(function):
    """(CUDA graph of `function`, its results). A capture that fails leaves the random generator usable for other tests.

    What `function` calls must have run before, so that nothing compiles in the capture.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = function()
    except RuntimeError:
        state = torch.Generator("cuda").graphsafe_get_state()
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(state)
        raise
    return graph, results
