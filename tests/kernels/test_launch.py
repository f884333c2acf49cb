"""Quick launches and custom ops: what is bound again, and what autograd sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from opengem.kernels import custom_op, launch
from opengem.kernels.custom_op import define


class _Compiled:
    """Stands for what Triton compiled, in any version of it (a kernel with scratch memory goes the common way)."""

    function, packed_metadata, metadata = 4711, (4, 1, 0), SimpleNamespace()
    src = SimpleNamespace(signature={"x_ptr": "*bf16"})

    def __init__(self):
        self.given = []

    @property
    def run(self):
        return _Run(self.given)


class _Run:
    global_scratch_size, profile_scratch_size = 16, 0

    def __init__(self, given):
        self.given = given

    def __call__(self, x, y, z, stream, function, facts, launched, entered, left, *arguments):
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


class _Clustered:
    """A kernel, and what it is compiled to before its first launch; `told` is what each launch says of its programs."""

    function, packed_metadata, metadata = 4711, (8, 1, 1024), SimpleNamespace(num_warps=8, shared=1024)
    src = SimpleNamespace(signature={"x_ptr": "*bf16"})

    def __init__(self):
        self.bound, self.told = 0, []

    def warmup(self, *arguments, grid, num_warps, num_stages):
        self.bound += 1
        return self

    def __getitem__(self, grid):
        return lambda *arguments: self.told.append(self.packed_metadata)

    @property
    def run(self):
        def run(x, y, z, stream, function, facts, *arguments):
            self.told.append(facts)

        run.global_scratch_size, run.profile_scratch_size = 16, 0
        return run


def test_programs_of_a_cluster_are_told_to_the_launcher(device):
    kernel = _Clustered()
    for key in ("key", "key", None, None):
        launch.launch(kernel, (5, 1, 1), key, ("x",), (64,), warps=8, cluster=4)
    assert kernel.told == 4 * [(8, 4, 1024)] and kernel.bound == 3


def test_this_triton_launches_clusters():
    pytest.importorskip("triton")
    assert launch.has_clusters()


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


@pytest.mark.parametrize("described", [0, 2])
def test_the_launcher_is_given_what_triton_gives_it(described, monkeypatch):
    """Triton 3.6 around a launcher that only takes notes, beside what is taken from it."""
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("another launcher")
    from triton.backends.nvidia import driver
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    x = torch.zeros(128, 64, dtype=torch.bfloat16)
    boxes = [TensorDescriptor(x[at:], [128 - at, 64], [64, 1], [64, 64], layout) for at in range(described)]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    signature = {f"box{at}": "tensordesc<bf16[64,64]>" for at in range(described)} | {"x_ptr": "*bf16", "n": "i32"}
    given = []
    metas = [meta] * described
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=lambda *a: a))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    vars(run).update(
        launch=driver.wrap_handle_tensordesc(lambda *a: given.append(a), signature, metas), num_ctas=1,
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=True)
    compiled = SimpleNamespace(run=run, function=4711, packed_metadata=(4, 1, 0), metadata=SimpleNamespace(
        tensordesc_meta=metas), src=SimpleNamespace(signature=signature))
    run(7, 1, 1, 17, 4711, (4, 1, 0), None, None, None, *boxes, x, 5, 64)
    launch._starter(compiled)((7, 1, 1), 17, (*boxes, x, 5), (64,))
    assert len(given) == 2 and len(given[0]) == 16 + 5 * described and repr(given[0]) == repr(given[1])


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


def test_what_ops_are_given_does_not_send_them_to_the_dispatcher():
    """Its two ways into Python cost more than all the rest of a call; one argument of another type takes them."""
    kinds = {"Tensor": Tensor, "Optional[Tensor]": Tensor, "int": int, "float": float, "bool": bool, "str": str,
             "List[int]": list}
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("opengem::")}
    assert {"gdpa_fwd", "jfa_bwd", "block_fwd", "norm_fwd"} <= names
    for name in names:
        arguments = getattr(torch.ops.opengem, name).default._schema.arguments
        given = tuple(kinds[str(argument.type)] for argument in arguments)
        assert custom_op._PLAIN.issuperset(given), name


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
