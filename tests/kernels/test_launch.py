"""Quick launches and custom ops: what is bound again, and what autograd sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from opengem.kernels import launch
from opengem.kernels.custom_op import define


class _Compiled:
    def __init__(self):
        self.given = []

    def __getitem__(self, grid):
        return lambda *arguments: self.given.append((grid, arguments))


class _Kernel:
    """Stands for a Triton kernel and counts how often arguments are bound."""

    def __init__(self):
        self.bound, self.compiled = 0, _Compiled()

    def __getitem__(self, grid):
        def bind(*arguments, num_warps, num_stages):
            self.bound += 1
            return self.compiled

        return bind


def test_equal_keys_are_bound_once():
    kernel = _Kernel()
    for rows in (5, 7, 9):
        launch.launch(kernel, (rows, 1, 1), ("cuda:0", torch.bfloat16), (rows,), (64, True))
    assert kernel.bound == 1
    assert kernel.compiled.given == [((7, 1, 1), (7, 64, True)), ((9, 1, 1), (9, 64, True))]


@pytest.mark.parametrize("change", [
    {"key": "other"}, {"key": None}, {"constants": (128,)}, {"warps": 8}, {"stages": 2},
])
def test_another_key_or_constant_is_bound_again(change):
    kernel = _Kernel()
    first = {"kernel": kernel, "grid": (1, 1, 1), "key": "key", "arguments": (), "constants": (64,)}
    launch.launch(**first)
    launch.launch(**first | change)
    assert kernel.bound == 2 and not kernel.compiled.given


class _Clustered(_Kernel):
    """The same, compiled before it is launched."""

    def __init__(self):
        super().__init__()
        self.compiled.metadata = SimpleNamespace(num_warps=8, shared=1024)

    def warmup(self, *arguments, grid, num_warps, num_stages):
        self.bound += 1
        return self.compiled


def test_programs_of_a_cluster_are_told_to_the_launcher():
    kernel = _Clustered()
    for key in ("key", "key", None, None):
        launch.launch(kernel, (5, 1, 1), key, ("x",), (64,), warps=8, cluster=4)
    assert kernel.compiled.packed_metadata == (8, 4, 1024)
    assert kernel.compiled.given == 4 * [((5, 1, 1), ("x", 64))] and kernel.bound == 3


def test_this_triton_launches_clusters():
    pytest.importorskip("triton")
    assert launch.has_clusters()


def test_alignment():
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert launch.aligned(x, x[8:]) and not launch.aligned(x, x[1:])


def test_a_second_derivative_is_an_error_and_no_gradient_is_saved_without_need():
    saved = []

    def run(x: Tensor) -> Tensor:
        return x * x

    def save(ctx, args, out):
        saved.append(ctx.save_for_backward(*args))

    square = define("test_square", run, torch.empty_like, save, lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad)
    x = torch.tensor([3.0], requires_grad=True)
    with torch.no_grad():
        assert not square(x).requires_grad and not saved
    (grad,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    assert grad == 6
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_autocast_stays_outside():
    def run(x: Tensor) -> Tensor:
        return x @ x

    product = define("test_product", run, torch.empty_like)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(torch.eye(2)).dtype == torch.float32
