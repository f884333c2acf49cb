"""Quick launches and custom ops: what is bound again, and what autograd sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opengem.kernels import launch
from opengem.kernels.custom_op import define


class _Compiled:
    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self):
        self.given = []

    def run(self, x, y, z, stream, function, facts, launched, entered, left, *arguments):
        assert (stream, function, facts, launched, entered, left) == (17, 4711, (4, 1, 0), None, None, None)
        self.given.append(((x, y, z), arguments))


class _Kernel:
    """Stands for a Triton kernel and counts how often arguments are bound."""

    def __init__(self):
        self.bound, self.compiled = 0, _Compiled()

    def __getitem__(self, grid):
        def bind(*arguments, num_warps, num_stages):
            self.bound += 1
            return self.compiled

        return bind


@pytest.fixture
def device(monkeypatch):
    """A device with a stream, where there is none."""
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "_device", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 17)
    return monkeypatch


def test_equal_keys_are_bound_once(device):
    kernel = _Kernel()
    for rows in (5, 7, 9):
        launch.launch(kernel, (rows, 1, 1), ("cuda:0", torch.bfloat16), (rows,), (64, True))
    assert kernel.bound == 1
    assert kernel.compiled.given == [((7, 1, 1), (7, 64, True)), ((9, 1, 1), (9, 64, True))]


@pytest.mark.parametrize("change", [
    {"key": "other"}, {"key": None}, {"constants": (128,)}, {"warps": 8}, {"stages": 2},
])
def test_another_key_or_constant_is_bound_again(change, device):
    kernel = _Kernel()
    first = {"kernel": kernel, "grid": (1, 1, 1), "key": "key", "arguments": (), "constants": (64,)}
    launch.launch(**first)
    launch.launch(**first | change)
    assert kernel.bound == 2 and not kernel.compiled.given


def test_another_current_device_is_bound_again(device):
    kernel = _Kernel()
    for current in (0, 1, 0, 1):
        device.setattr(launch, "_device", lambda: current)  # noqa: B023 (called before the next turn)
        launch.launch(kernel, (1, 1, 1), "key", (), (64,))
    assert kernel.bound == 2 and len(kernel.compiled.given) == 2


def test_a_hook_of_triton_sees_every_launch(device):
    from triton import knobs

    kernel, hook = _Kernel(), lambda metadata: None
    launch.launch(kernel, (1, 1, 1), "key", (), (64,))
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch.launch(kernel, (1, 1, 1), "key", (), (64,))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert kernel.bound == 2


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


# ---- on a GPU --------------------------------------------------------------------------------------------------


def _norm(x):
    from opengem.kernels import rms_norm

    return rms_norm(x, torch.ones(x.shape[1], dtype=x.dtype, device=x.device))


def _shifted(rows: int, shift: int) -> Tensor:
    """`[rows, 64]` that starts so many elements behind a multiple of 16 bytes."""
    return torch.randn(rows * 64 + shift, device="cuda", dtype=torch.bfloat16)[shift:].view(rows, 64)


@pytest.mark.gpu
def test_pointers_of_another_alignment_and_other_counts():
    """Each is right after the others were cached: 1 and multiples of 16 are what Triton specialises on."""
    for rows, shift in [(16, 0), (16, 1), (1, 0), (33, 0), (16, 8), (48, 3), (16, 0)] * 2:
        x = _shifted(rows, shift)
        want = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5)
        torch.testing.assert_close(_norm(x).float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_the_current_stream_is_taken():
    """What a busy stream still has to write is read: the launch stands behind it, in eager code and in a graph."""
    x = _shifted(16, 0)
    want = _norm(x)
    stale, side = torch.zeros_like(x), torch.cuda.Stream()
    _norm(stale)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        stale.copy_(x)
        got = _norm(stale)
    side.synchronize()
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _norm(stale)
    stale.neg_()
    graph.replay()
    assert torch.equal(captured, _norm(-x))


@pytest.mark.gpu
def test_the_current_device_is_taken():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1, 0, 1):
        with torch.cuda.device(index):
            x = _shifted(16, 0)
            want = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5)
            torch.testing.assert_close(_norm(x).float(), want, rtol=1e-2, atol=1e-2)
