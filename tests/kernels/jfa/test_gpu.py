"""The kernels on a GPU: accuracy, edge shapes, determinism, no syncs, graphs, compilation, sizes behind 2^31."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from opengem.kernels import backend
from opengem.kernels.jfa.op import PairBias, RelativeBias, jagged_flash_attention
from tests.kernels import grid
from tests.kernels.jfa import naive, test_op

pytestmark = pytest.mark.gpu
GPU = "cuda"
RAGGED = [17, 300, 4, 64, 0, 129, 1, 515]
SHAPES = [
    (dim, dtype, option) for dim in (64, 128) for dtype in (torch.bfloat16, torch.float16)
    for option in ("plain", "causal", "window", "pair", "relative_causal")
] + [(dim, torch.bfloat16, option) for dim in (32, 96, 256) for option in ("plain", "causal_window", "relative")]


def snr(got, want):
    """Signal to noise in dB."""
    noise = (got.double() - want.double()).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(want.double().square().sum() / noise))


def results(leaves, m, n, options, run):
    out, lse = run(leaves, m, n, **options)
    return [out, *test_op.gradients(out, torch.zeros_like(lse), leaves)]


def exact_leaves(leaves):
    return [None if x is None else x.detach().double().requires_grad_() for x in leaves]


def plain_torch(leaves, m, n, bias=None, **options):
    """Attention as one would write it, in the dtype of the inputs: the yardstick for rounding errors."""
    bias = {"pair": PairBias, "relative": RelativeBias}[bias](leaves[3]) if bias else None
    return naive.attention(*leaves[:3], m, n, bias=bias, dtype=leaves[0].dtype, **options)


@pytest.mark.parametrize(("dim", "dtype", "option"), SHAPES)
def test_accuracy(dim, dtype, option):
    """Error at most twice (gradients three times) that of plain PyTorch in the same dtype, and little noise."""
    options = test_op.OPTIONS[option]
    leaves, m, n = test_op.make(RAGGED, dim=dim, dtype=dtype, bias=options.get("bias"), device=GPU)
    want = results(exact_leaves(leaves), m, n, options, test_op.truth)
    got = results(leaves, m, n, options, test_op.run)
    plain = results(leaves, m, n, options, plain_torch)
    for at, (a, b, c) in enumerate(zip(got, want, plain, strict=True)):
        error, allowed = (a.double() - b).abs().max(), (c.double() - b).abs().max()
        assert error <= (2 if at == 0 else 3) * allowed + 1e-5, (at, error, allowed)
        assert snr(a, b) > (45 if at == 0 else 40), (at, snr(a, b))


@pytest.mark.parametrize("option", ["plain", "causal_window", "pair", "relative"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", grid.LENGTHS)
def test_every_edge_case(name, dim, option, poisoned_empty):
    options = test_op.OPTIONS[option]
    leaves, m, n = test_op.make(name, dim=dim, dtype=torch.bfloat16, bias=options.get("bias"), device=GPU)
    exact = exact_leaves(leaves)
    out, lse = test_op.run(leaves, m, n, **options)
    want_out, want_lse = test_op.truth(exact, m, n, **options)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)
    got = [out, *test_op.gradients(out, lse, leaves)]
    want = [want_out, *test_op.gradients(want_out, want_lse, exact)]
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        largest = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=3e-2, atol=3e-2 * max(1.0, largest))


@pytest.mark.parametrize("option", ["plain", "causal", "window", "relative"])
def test_same_bits_in_every_run_and_in_every_batch_order(option):
    options = test_op.OPTIONS[option]
    leaves, m, n = test_op.make(RAGGED * 8, dim=128, dtype=torch.bfloat16, bias=options.get("bias"), device=GPU)
    first = results(leaves, m, n, options, test_op.run)
    for _ in range(20):
        again = results(leaves, m, n, options, test_op.run)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    order = torch.randperm(len(m)).tolist()
    rows = torch.cat([torch.arange(sum(m[:b]), sum(m[: b + 1])) for b in order]).to(GPU)
    dout = torch.randn_like(first[0])
    moved = [x.detach()[rows].requires_grad_() for x in leaves[:3]]
    here = test_op.run(leaves, m, n, **options)[0]
    there = test_op.run([*moved, leaves[3]], [m[b] for b in order], [n[b] for b in order], **options)[0]
    assert torch.equal(here[rows], there)
    here, there = torch.autograd.grad(here, leaves[:3], dout), torch.autograd.grad(there, moved, dout[rows])
    assert all(torch.equal(a[rows], b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("option", ["plain", "causal", "window"])
def test_more_samples_than_are_sorted_have_the_gradients_of_smaller_batches(option):
    """Up to 2,048 samples the Hopper backward takes those with most work first, beyond that all in their order."""
    lengths, options = [3, 0, 130, 64, 1] * 500, test_op.OPTIONS[option]
    leaves, m, n = test_op.make(lengths, dim=64, dtype=torch.bfloat16, device=GPU)
    whole = torch.autograd.grad(test_op.run(leaves, m, n, **options)[0].sum(), leaves[:3])
    rows = sum(lengths) // 5
    for part in range(5):
        mine = [x.detach()[part * rows : (part + 1) * rows].requires_grad_() for x in leaves[:3]]
        out, _ = test_op.run([*mine, None], m[part * 500 :][:500], n[part * 500 :][:500], **options)
        for a, b in zip(whole, torch.autograd.grad(out.sum(), mine), strict=True):
            assert torch.equal(a[part * rows : (part + 1) * rows], b)


FEW_QUERIES = [64, 0, 1, 63, 65, 3, 250, 16] * 33, [1000, 600, 1, 127, 129, 0, 512, 1300] * 33


@pytest.mark.parametrize("option", ["plain", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_against_many_keys(dim, option):
    """Pooling: in the Hopper backward the key tiles of 256 samples alternate in the queue."""
    options = test_op.OPTIONS[option]
    leaves, m, n = test_op.make(FEW_QUERIES, dim=dim, dtype=torch.bfloat16, device=GPU)
    want = results(exact_leaves(leaves), m, n, options, test_op.truth)
    plain = results(leaves, m, n, options, plain_torch)
    first, *again = (results(leaves, m, n, options, test_op.run) for _ in range(6))
    for at, (a, b, c) in enumerate(zip(first, want, plain, strict=True)):
        error, allowed = (a.double() - b).abs().max(), (c.double() - b).abs().max()
        assert error <= 3 * allowed + 1e-5, (at, error, allowed)
        assert snr(a, b) > 40, (at, snr(a, b))
    assert all(torch.equal(a, b) for run in again for a, b in zip(first, run, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_in_strided_views(dim):
    """Queries of one half of a buffer, keys and values side by side in another: the bits of dense copies."""
    leaves, m, n = test_op.make(FEW_QUERIES, dim=dim, dtype=torch.bfloat16, device=GPU)
    q, k, v = (x.detach() for x in leaves[:3])
    views = [torch.cat([q, q + 1], 1)[:, :4], *torch.cat([k, v], 1).split(2, 1)]
    got, want = (results([*(x.detach().requires_grad_() for x in tensors), None], m, n, {}, test_op.run)
                 for tensors in (views, [q, k, v]))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strided_views_of_one_buffer():
    lengths = [130, 0, 77]
    views = [x.detach().requires_grad_() for x in grid.fused_views(207, 2, 64, GPU, torch.bfloat16)]
    dense = [x.detach().contiguous().requires_grad_() for x in views]
    offsets = grid.offsets(lengths, GPU, torch.int32)
    outs = [jagged_flash_attention(*x, offsets, max_q=130) for x in (views, dense)]
    assert torch.equal(*outs)
    dout = torch.randn_like(outs[0])
    for a, b in zip(torch.autograd.grad(outs[0], views, dout), torch.autograd.grad(outs[1], dense, dout), strict=True):
        assert torch.equal(a, b)


def test_rows_behind_the_offsets_get_zeros(poisoned_empty):
    leaves, m, _ = test_op.make([5, 200], dim=64, dtype=torch.bfloat16, device=GPU)
    q, k, v = leaves[:3]
    out = jagged_flash_attention(q, k, v, grid.offsets([5, 60], GPU), max_q=200)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all((x[65:] == 0).all() and x.isfinite().all() for x in (out, *grads))


def _step(leaves, offsets, most, **options):
    out = jagged_flash_attention(*leaves, offsets, max_q=most, **options)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_never_waits_for_the_gpu():
    leaves, m, _ = test_op.make(RAGGED, dim=128, dtype=torch.bfloat16, device=GPU)
    offsets = grid.offsets(m, GPU)
    _step(leaves[:3], offsets, 515, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(leaves[:3], offsets, 515, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_follows_its_inputs():
    leaves, m, _ = test_op.make(RAGGED, dim=64, dtype=torch.bfloat16, device=GPU)
    offsets = grid.offsets(m, GPU)
    _step(leaves[:3], offsets, 600)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(leaves[:3], offsets, 600)
    with torch.no_grad():
        for x in leaves[:3]:
            x.copy_(torch.randn_like(x))
        offsets.copy_(grid.offsets([100, 200, 30, 0, 500, 1, 99, 100], GPU))
    graph.replay()
    for a, b in zip(captured, _step(leaves[:3], offsets, 600), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
def test_no_new_kernels_when_totals_change(implementation):
    from opengem.kernels.jfa import gluon_sm90, gluon_sm90_backward, triton

    kernels = {"triton": (triton._forward_kernel, triton._dq_kernel, triton._dkdv_kernel),
               "gluon": (gluon_sm90._schedule_kernel, gluon_sm90._forward_kernel, gluon_sm90_backward._prepare_kernel,
                         gluon_sm90_backward._backward_kernel)}[implementation]
    counts = []
    with backend.force(implementation):
        for lengths in ([3, 5], [16] * 16, [1], [7, 0, 1000], [33] * 77):
            leaves, m, _ = test_op.make(lengths, dim=64, dtype=torch.bfloat16, device=GPU)
            _step(leaves[:3], grid.offsets(m, GPU), max(m))
            counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert counts[0] == counts[-1] > 0, counts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_extra_memory_is_what_the_docs_say(dim, causal):
    """Peak of the bytes asked for, beyond inputs and outputs; a block of the allocator may be up to 1 MiB larger."""
    lengths = [500, 1, 0, 1200, 64] * 40
    leaves, m, _ = test_op.make(lengths, dim=dim, dtype=torch.bfloat16, device=GPU)
    q, k, v = leaves[:3]
    offsets, heads, rows = grid.offsets(m, GPU), q.shape[1], q.shape[0]
    _step((q, k, v), offsets, 1200, causal=causal)
    slots, records = rows // 64 + len(m) + 1, rows // 128 + len(m) + 1

    def peak_of(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = run()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, result

    extra, out = peak_of(lambda: jagged_flash_attention(q, k, v, offsets, max_q=1200, causal=causal))
    assert extra - out.nbytes == 4 * heads * rows + 20 * records + 4
    dout = torch.ones_like(out)
    extra, _ = peak_of(lambda: torch.autograd.grad(out, (q, k, v), dout))
    formula = 4 * heads * slots * (64 * dim + 129) + 24 * records + 4
    assert extra - q.nbytes - k.nbytes - v.nbytes == formula


def test_compiles_without_graph_breaks_or_recompiles():
    def step(q, k, v, offsets):
        return jagged_flash_attention(q, k, v, offsets, max_q=64, causal=True).sin()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 6], [7, 0, 20], [1, 2, 3, 64]):
        leaves = [torch.randn(sum(lengths), 2, 64, device=GPU, dtype=torch.bfloat16) for _ in range(3)]
        offsets = grid.offsets(lengths, GPU)
        torch.testing.assert_close(compiled(*leaves, offsets), step(*leaves, offsets))
    assert counter.frame_count == 1


def test_65536_samples_of_one_row():
    v = torch.randn(65536, 1, 64, device=GPU, dtype=torch.bfloat16)
    assert torch.equal(jagged_flash_attention(v, v, v, torch.arange(65537, device=GPU), max_q=1), v)


def test_more_than_2_to_the_31_elements():
    """The last samples of 4,194,432 rows of 8 heads x 64, forward and backward."""
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        pytest.skip("needs 60 GB")
    length, batch = 128, 32769
    x = torch.randn(batch * length, 8, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    out = jagged_flash_attention(x, x, x, torch.arange(batch + 1, device=GPU) * length, max_q=length)
    (grad,) = torch.autograd.grad(out, x, out.detach())
    tail = x.detach()[-2 * length :].double().requires_grad_()
    want, _ = naive.attention(tail, tail, tail, [length] * 2, [length] * 2)
    (want_grad,) = torch.autograd.grad(want, tail, want.detach())
    assert snr(out[-2 * length :], want) > 45 and snr(grad[-2 * length :], want_grad) > 40
