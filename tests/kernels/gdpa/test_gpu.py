"""The fast kernels on a GPU: accuracy, exact repeatability, streams, graphs, compilation, addresses past 2^31."""

from __future__ import annotations

import pytest
import torch

from opengem.kernels.gdpa import gdpa, gdpa_schedule
from opengem.kernels.gdpa.activations import ACTIVATIONS
from tests.kernels import grid
from tests.kernels.gdpa import naive

pytestmark = pytest.mark.gpu
LABELS = ("out", "dq", "dk", "dv")


def leaves(q_rows, kv_rows, heads=2, dim=64, dtype=torch.bfloat16, seed=0):
    """q, k, v as strided views of fused buffers."""
    q, _, _ = grid.fused_views(q_rows, heads, dim, device="cuda", dtype=dtype, seed=seed)
    _, k, v = grid.fused_views(kv_rows, heads, dim, device="cuda", dtype=dtype, seed=seed + 1)
    return [x.detach().requires_grad_() for x in (q, k, v)]


def build(q_lengths, kv_lengths, seeds=0, **options):
    """(q, k, v), q lengths, kv lengths, keyword arguments."""
    q_lengths = [seeds] * len(kv_lengths) if seeds else q_lengths
    arguments = {
        "q_offsets": None if seeds else grid.offsets(q_lengths, "cuda"),
        "kv_offsets": grid.offsets(kv_lengths, "cuda", torch.int32),
        "max_q": seeds or max(q_lengths, default=0), "max_kv": max(kv_lengths, default=0), "shared_q": bool(seeds),
    }
    return leaves(seeds or sum(q_lengths), sum(kv_lengths), **options), q_lengths, kv_lengths, arguments


def run(qkv, grad=None, **arguments):
    """[out, dq, dk, dv]"""
    out = gdpa(*qkv, **arguments)
    grad = torch.randn_like(out) if grad is None else grad
    return [out.detach(), *naive.gradients(out, qkv, grad)], grad


def assert_accurate(qkv, q_lengths, kv_lengths, arguments, activation="gelu_tanh", scale=0.2):
    """At most 2x (gradients 3x) the error of the formula in the inputs' precision, and 45 (40) dB."""
    got, grad = run(qkv, activation=activation, scale=scale, **arguments)
    shape = (q_lengths, kv_lengths, activation, scale, arguments["shared_q"])
    exact, plain = (naive.gdpa(*qkv, *shape, dtype=dtype) for dtype in (torch.float64, qkv[0].dtype))
    truth = [exact.detach(), *naive.gradients(exact, qkv, grad)]
    rounded = [plain.detach(), *naive.gradients(plain, qkv, grad)]
    for label, x, t, r in zip(LABELS, got, truth, rounded, strict=True):
        assert x.isfinite().all(), label
        t = t.double()
        error, allowed = _largest(x - t), _largest(r - t)
        factor = 2 if label == "out" else 3
        floor = 1e-2 * _largest(t) + 1e-5
        assert error <= max(factor * allowed, floor), f"{label}: {error:.3e}, allowed {factor} x {allowed:.3e}"
        if t.numel() and float(t.norm()):
            snr = 20 * torch.log10(t.norm() / (x.double() - t).norm().clamp_min(1e-30))
            assert float(snr) > (45 if label == "out" else 40), f"{label}: {float(snr):.1f} dB"


def _largest(x) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@pytest.mark.parametrize("seeds", [0, 5, 70])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", grid.LENGTHS)
@pytest.mark.usefixtures("poisoned_empty")
def test_edge_lengths(name, dim, seeds):
    assert_accurate(*build(*grid.case(name), seeds, dim=dim))


@pytest.mark.parametrize("lengths", [[3, 66, 200], [5, 33]], ids=["wide", "narrow"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, lengths):
    assert_accurate(*build(lengths, [300, 70, 129][: len(lengths)]), activation=activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("lengths", [[3, 66, 200], [5, 33, 64]], ids=["wide", "narrow"])
def test_head_dimensions_and_dtypes(dim, dtype, lengths):
    assert_accurate(*build(lengths, [300, 70, 129], dim=dim, dtype=dtype, heads=3))


@pytest.mark.parametrize("kv_lengths", [[512, 129, 0, 1, 300], [130, 512, 65, 3, 511], [256, 129, 0, 1, 200]],
                         ids=["cross", "mixed", "one owner"])
def test_dq_over_several_key_tiles(kv_lengths):
    """The backward in one kernel: dq is summed over tiles of 128 keys, by one block where keys are at most 256."""
    assert_accurate(*build([130, 512, 65, 0, 300], kv_lengths, dim=128))


@pytest.mark.parametrize("q_lengths, kv_lengths", [
    ([1024, 1000, 65, 0, 2049, 64], [1024, 1000, 65, 130, 2049, 0]), ([2049, 65, 700, 600], [600, 1025, 1, 2048]),
    ([8600], [8600]),
], ids=["self", "cross", "more tiles than blocks"])
def test_dq_in_turns(q_lengths, kv_lengths):
    """Blocks add to dq in turn; in the last case a sample has more key tiles than half the multiprocessors."""
    assert_accurate(*build(q_lengths, kv_lengths, dim=128, heads=1 if len(q_lengths) == 1 else 2))


@pytest.mark.parametrize("size", [256, 600, 2048])
def test_turns_leave_the_same_bits(size):
    """K5: many samples at once, whatever block comes first."""
    lengths = [(311 * i) % size for i in range(200)]
    qkv, _, _, arguments = build(lengths, lengths, dim=128)
    first, grad = run(qkv, activation="gelu_tanh", **arguments)
    for _ in range(10):
        again, _ = run(qkv, grad, activation="gelu_tanh", **arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_long_keys_in_several_runs():
    assert_accurate(*build([7, 64, 1], [5000, 0, 2049]))
    assert_accurate(*build([], [5000, 0, 2049], seeds=32))


@pytest.mark.parametrize("seeds", [0, 32])
def test_same_bits_every_run_and_under_permutation(seeds):
    """K5."""
    lengths = [129, 1, 0, 700, 64, 256, 33]
    qkv, _, _, arguments = build(lengths, lengths, seeds, dim=128)
    first, grad = run(qkv, activation="gelu", **arguments)
    for _ in range(20):
        again, _ = run(qkv, grad, activation="gelu", **arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    order = [3, 0, 6, 2, 5, 1, 4]
    pick = torch.cat([torch.arange(sum(lengths[:b]), sum(lengths[: b + 1])) for b in order]).cuda()
    moved = [x[pick].detach().requires_grad_() if len(x) == len(pick) else x for x in qkv]
    out_pick = torch.cat([torch.arange(b * seeds, (b + 1) * seeds) for b in order]).cuda() if seeds else pick
    arguments["kv_offsets"] = grid.offsets([lengths[b] for b in order], "cuda")
    if not seeds:
        arguments["q_offsets"] = arguments["kv_offsets"]
    other, _ = run(moved, grad[out_pick], activation="gelu", **arguments)
    assert torch.equal(other[0], first[0][out_pick])
    for a, b in list(zip(other, first, strict=True))[2 if seeds else 1 :]:
        assert torch.equal(a, b[pick])


def test_a_sample_alone_has_the_same_bits():
    """K8, K10: batch mates change nothing, not even their NaN."""
    qkv, _, _, arguments = build([130, 70], [130, 70])
    beside = gdpa(*qkv, **arguments).detach()
    alone = gdpa(*(x[:130] for x in qkv), grid.offsets([130], "cuda"), max_q=130).detach()
    assert torch.equal(beside[:130], alone)
    poisoned = [x.detach().clone() for x in qkv]
    for x in poisoned:
        x[130:] = float("nan")
    assert torch.equal(gdpa(*poisoned, **arguments)[:130], alone)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("max_q", [64, 200])
def test_rows_of_nobody_are_zero(max_q):
    """K3: rows behind the last offset."""
    qkv = leaves(500, 600)
    q_offsets, kv_offsets = grid.offsets([30, 0, 50], "cuda"), grid.offsets([100, 7, 0], "cuda")
    got, _ = run(qkv, q_offsets=q_offsets, kv_offsets=kv_offsets, max_q=max_q, max_kv=100)
    for x, owned in zip(got, (80, 80, 107, 107), strict=True):
        assert torch.equal(x[owned:], torch.zeros_like(x[owned:])) and x.isfinite().all()
    empty = grid.offsets([], "cuda")
    got, _ = run(qkv, q_offsets=empty, kv_offsets=empty, max_q=max_q, max_kv=100)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in got)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gelu_poly", "silu"])
def test_large_scores(activation):
    """K9: |score| = 11 and 100."""
    for rows in (3, 80):
        q = torch.zeros(rows, 1, 32, device="cuda", dtype=torch.bfloat16)
        q[0], q[1], q[2] = 11 / 32, 100 / 32, -100 / 32
        k = torch.ones(1, 1, 32, device="cuda", dtype=torch.bfloat16)
        offsets = grid.offsets([rows], "cuda"), grid.offsets([1], "cuda")
        qkv = [x.requires_grad_() for x in (q, k, k.clone())]
        got, _ = run(qkv, q_offsets=offsets[0], kv_offsets=offsets[1], max_q=rows, max_kv=1, activation=activation)
        truth = torch.tensor([11.0, 100.0, 0.0], device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(got[0][:3, 0, 0], truth, rtol=1e-2, atol=1e-2)
        assert all(x.isfinite().all() for x in got)


def test_shared_schedule_changes_nothing():
    for seeds in (0, 32):
        qkv, _, _, arguments = build([130, 5, 64], [130, 5, 64], seeds)
        names = ("q_offsets", "kv_offsets", "max_q", "shared_q")
        schedule = gdpa_schedule(*qkv[:2], **{name: arguments[name] for name in names})
        first, grad = run(qkv, **arguments)
        second, _ = run(qkv, grad, schedule=schedule, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(ValueError, match="schedule has"):
            gdpa(*qkv, schedule=schedule[:-2], **arguments)


@pytest.mark.parametrize("seeds", [0, 32])
def test_no_host_sync(seeds):
    qkv, _, _, arguments = build([130, 5, 64], [130, 5, 64], seeds)
    run(qkv, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(qkv, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_follows_new_offsets():
    qkv, _, _, arguments = build([130, 5, 64], [130, 5, 64])
    arguments["kv_offsets"] = arguments["q_offsets"]
    grad = torch.randn_like(qkv[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(qkv, grad, **arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = run(qkv, grad, **arguments)
    arguments["q_offsets"].copy_(grid.offsets([0, 129, 70], "cuda"))
    graph.replay()
    torch.cuda.synchronize()
    eager, _ = run(qkv, grad, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.parametrize("seeds", [0, 32])
def test_compiles_whole(seeds):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **b: gdpa(*a, **b) * 2, fullgraph=True, dynamic=True)
    for step, lengths in enumerate(([130, 5, 64], [70, 7, 3, 9], [99, 200], [1, 129, 128, 127, 3])):
        qkv, _, _, arguments = build([n + 1 for n in lengths], lengths, seeds)
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            out = compiled(*qkv, **arguments)
            out.sum().backward()
        assert torch.equal(out, gdpa(*qkv, **arguments) * 2)


def test_no_kernel_compiles_for_new_sizes():
    """K12: batch size and token counts are not part of any kernel's identity."""
    from opengem.kernels.gdpa import triton as kernels

    def compiled() -> int:
        jits = [x for x in vars(kernels).values() if hasattr(x, "device_caches")]
        return sum(len(cache[0]) for jit in jits for cache in jit.device_caches.values())

    for lengths in ([130, 5], [16] * 8 + [65]):
        run(build(lengths, lengths)[0], **build(lengths, lengths)[3])
    before = compiled()
    for lengths in ([130, 5, 64], [700], [1] * 1000 + [128], [99, 255], [16] * 64 + [80]):
        qkv, _, _, arguments = build(lengths, lengths)
        run(qkv, **arguments)
    assert compiled() == before


def test_many_tiny_samples():
    rows = 65536
    qkv = leaves(rows, rows, heads=1, dim=32)
    offsets = torch.arange(rows + 1, device="cuda")
    got, grad = run(qkv, q_offsets=offsets, max_q=1, activation="identity")
    q, k, v = (x.detach().double() for x in qkv)
    truth = (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(got[0].double(), truth, rtol=2e-2, atol=2e-2)
    wide, _ = run(qkv, grad, q_offsets=offsets, max_q=65, activation="identity")
    torch.testing.assert_close(wide[0].double(), truth, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("last", [40, 200])
def test_addresses_past_two_to_the_31(last):
    """K6: row stride 2048, the last sample starts at row 2^20, behind 2^14 of 64 rows."""
    rows = 2**20 + last
    storage = torch.zeros(rows, 2048, device="cuda", dtype=torch.bfloat16)
    storage[-last:] = torch.randn(last, 2048, device="cuda", dtype=torch.bfloat16)
    q, k, v = (storage[:, i * 64 : (i + 1) * 64].unflatten(1, (1, 64)) for i in range(3))
    far = torch.cat([torch.arange(0, 2**20 + 1, 64), torch.tensor([rows])]).cuda()
    near = grid.offsets([last], "cuda")
    with torch.no_grad():
        got = gdpa(q, k, v, far, max_q=max(last, 64))
        want = gdpa(*(x[-last:].contiguous() for x in (q, k, v)), near, max_q=max(last, 64))
    assert torch.equal(got[-last:], want)


def test_fp32_runs_the_reference():
    qkv, q_lengths, kv_lengths, arguments = build([130, 0, 5], [7, 3, 0], dtype=torch.float32)
    truth = naive.gdpa(*qkv, q_lengths, kv_lengths)
    torch.testing.assert_close(gdpa(*qkv, **arguments), truth.float(), rtol=1e-3, atol=1e-3)
