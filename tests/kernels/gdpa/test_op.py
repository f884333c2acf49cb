"""`gdpa` on a CPU: values, gradients, contracts (opcheck, compile), errors, determinism and batch invariance."""

from __future__ import annotations

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.gdpa import gdpa, reference
from opengem.kernels.gdpa.activations import ACTIVATIONS
from opengem.kernels.jfa import reference as chunked
from tests.kernels import grid
from tests.kernels.gdpa import naive


def tensors(q_rows, kv_rows, heads=2, dim=8, dtype=torch.float32, seed=0):
    """q, k, v as strided views of fused buffers, requiring gradients."""
    q, _, _ = grid.fused_views(q_rows, heads, dim, dtype=dtype, seed=seed)
    _, k, v = grid.fused_views(kv_rows, heads, dim, dtype=dtype, seed=seed + 1)
    return [x.requires_grad_() for x in (q.detach(), k.detach(), v.detach())]


def inputs_of(name, seeds=0, **options):
    """(q, k, v), q lengths, kv lengths, keyword arguments of a grid case (`seeds` > 0: shared queries)."""
    q_lengths, kv_lengths = grid.case(name)
    q_lengths = [seeds] * len(kv_lengths) if seeds else q_lengths
    q, k, v = tensors(seeds or sum(q_lengths), sum(kv_lengths), **options)
    arguments = {
        "q_offsets": None if seeds else grid.offsets(q_lengths),
        "kv_offsets": grid.offsets(kv_lengths, dtype=torch.int32),
        "max_q": seeds or max(q_lengths, default=0),
        "max_kv": max(kv_lengths, default=0),
        "shared_q": bool(seeds),
    }
    return (q, k, v), q_lengths, kv_lengths, arguments


def assert_matches_naive(qkv, q_lengths, kv_lengths, arguments, activation, scale, tolerance=2e-5):
    shared_q = arguments["shared_q"]
    truth = naive.gdpa(*qkv, q_lengths, kv_lengths, activation, scale, shared_q)
    out = gdpa(*qkv, activation=activation, scale=scale, **arguments)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, truth.to(out.dtype), rtol=tolerance, atol=tolerance)
    wanted = naive.gradients(truth, qkv, grad)
    for name, got, want in zip("qkv", naive.gradients(out, qkv, grad), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 10, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("seeds", [0, 5])
@pytest.mark.parametrize("name", grid.LENGTHS)
@pytest.mark.usefixtures("poisoned_empty")
def test_edge_lengths(name, seeds):
    """K1, K2, K10 and K3's poison: every length pattern, forward and backward, no cell unwritten."""
    qkv, q_lengths, kv_lengths, arguments = inputs_of(name, seeds)
    assert_matches_naive(qkv, q_lengths, kv_lengths, arguments, "gelu", 0.3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    qkv, q_lengths, kv_lengths, arguments = inputs_of("zero_q", dim=16)
    assert_matches_naive(qkv, q_lengths, kv_lengths, arguments, activation, 0.7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("seeds", [0, 3])
def test_gradcheck(activation, seeds):
    q, k, v = tensors(seeds or 5, 6, heads=1, dim=4, dtype=torch.float64)
    q_offsets = None if seeds else torch.tensor([0, 2, 2, 5])
    kv_offsets = torch.tensor([0, 4, 5, 6])

    def run(q, k, v):
        return gdpa(q, k, v, q_offsets, kv_offsets, max_q=3, max_kv=4, activation=activation, scale=0.5,
                    shared_q=bool(seeds))

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_small_memory_budget_gives_the_same_result(monkeypatch):
    qkv, q_lengths, kv_lengths, arguments = inputs_of("unsorted")
    for module in (reference, chunked):
        monkeypatch.setattr(module, "SCORES", 700)  # forces many chunks and split query rows
    assert_matches_naive(qkv, q_lengths, kv_lengths, arguments, "silu", 0.5)


def test_chunks_in_order_for_devices_without_host_offsets(monkeypatch):
    """The path a GPU takes: no length is read back."""
    qkv, q_lengths, kv_lengths, arguments = inputs_of("long_q_short_kv")
    monkeypatch.setattr(reference, "chunks", lambda q, kv, max_q, max_kv, heads: [
        (part, 130, 16) for part in torch.arange(3).split(2)])
    assert_matches_naive(qkv, q_lengths, kv_lengths, arguments, "gelu_poly", 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    qkv, q_lengths, kv_lengths, arguments = inputs_of("unsorted", dtype=dtype)
    out = gdpa(*qkv, scale=0.3, **arguments)
    truth = naive.gdpa(*qkv, q_lengths, kv_lengths, "gelu", 0.3)
    assert out.dtype == dtype
    assert float(((out - truth).norm() / truth.norm()).detach()) < (4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_other_samples_do_not_matter():
    """K8: a user of length 2 alone and beside a user of length 8; foreign NaN does not leak either."""
    q, k, v = (x.detach() for x in tensors(10, 10))
    alone = gdpa(q[:2], k[:2], v[:2], torch.tensor([0, 2]), max_q=2)
    for x in (q, k, v):
        x[2:] = float("nan")
    beside = gdpa(q, k, v, torch.tensor([0, 2, 10]), max_q=8)
    torch.testing.assert_close(beside[:2], alone, rtol=1e-6, atol=1e-6)


def test_maxima_do_not_enter_the_result():
    q, k, v = tensors(6, 6)
    offsets = torch.tensor([0, 2, 6])
    tight = gdpa(q, k, v, offsets, max_q=4)
    assert torch.equal(tight, gdpa(q, k, v, offsets, max_q=1000))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gelu_poly", "silu"])
def test_large_scores(activation):
    """K9: scores of +-11 and +-100."""
    q = torch.tensor([[[11.0, 0]], [[100.0, 0]], [[-100.0, 0]]], requires_grad=True)
    k = torch.tensor([[[1.0, 0]]], requires_grad=True)
    v = torch.ones(1, 1, 2, requires_grad=True)
    out = gdpa(q, k, v, torch.tensor([0, 3]), torch.tensor([0, 1]), max_q=3, max_kv=1, activation=activation)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([11.0, 100.0, 0.0]), rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(grads[0][:, 0, 0], torch.tensor([2.0, 2.0, 0.0]), rtol=1e-3, atol=1e-3)
    assert all(g.isfinite().all() for g in grads)


def test_same_bits_every_run():
    qkv, _, _, arguments = inputs_of("giant_among_tiny")
    first = gdpa(*qkv, **arguments)
    grads = torch.autograd.grad(first.sum(), qkv)
    for _ in range(3):
        again = gdpa(*qkv, **arguments)
        assert torch.equal(first, again)
        assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(again.sum(), qkv), strict=True))


def test_self_attention_is_the_default():
    q, k, v = tensors(7, 7)
    offsets = torch.tensor([0, 4, 7])
    assert torch.equal(gdpa(q, k, v, offsets, max_q=4), gdpa(q, k, v, offsets, offsets, max_q=4, max_kv=4))


def test_shared_queries_are_repeated_queries():
    qkv, _, kv_lengths, arguments = inputs_of("short_q_long_kv", seeds=5)
    shared = gdpa(*qkv, scale=0.5, **arguments)
    repeated = gdpa(
        qkv[0].repeat(4, 1, 1), *qkv[1:], grid.offsets([5] * 4), arguments["kv_offsets"], max_q=5,
        max_kv=arguments["max_kv"], scale=0.5,
    )
    torch.testing.assert_close(shared, repeated)
    explicit = gdpa(*qkv, scale=0.5, **{**arguments, "q_offsets": grid.offsets([5] * 4)})
    assert torch.equal(shared, explicit)


@pytest.mark.parametrize("seeds", [0, 3])
def test_opcheck(seeds):
    qkv, _, _, arguments = inputs_of("zero_kv", seeds)
    q_offsets = torch.empty(0, dtype=torch.int32) if seeds else arguments["q_offsets"]
    options = (arguments["max_q"], arguments["max_kv"], "gelu", 0.5, bool(seeds))
    torch.library.opcheck(torch.ops.opengem.gdpa_fwd, (*qkv, q_offsets, arguments["kv_offsets"], None, *options))


@pytest.mark.parametrize("seeds", [0, 3])
def test_compiles_without_graph_breaks_or_recompiles(seeds):
    """K12: five batches of different sizes, one compiled graph."""
    compiled = torch.compile(gdpa, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.reset()
    for step, name in enumerate(["long_q_short_kv", "unsorted", "short_q_long_kv", "tile_edges_64", "zero_q"]):
        qkv, q_lengths, kv_lengths, arguments = inputs_of(name, seeds)
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            out = compiled(*qkv, **arguments)
            grads = torch.autograd.grad(out.sum(), qkv)
        eager = gdpa(*qkv, **arguments)
        torch.testing.assert_close(out, eager)
        for got, want in zip(grads, torch.autograd.grad(eager.sum(), qkv), strict=True):
            torch.testing.assert_close(got, want)


Q, OFFSETS = torch.zeros(4, 2, 8), torch.tensor([0, 1, 4])
BAD = {
    "offsets end early": ({"q_offsets": torch.tensor([0, 2])}, "4 rows, kv_offsets run from 0 to 2"),
    "count": ({"kv_offsets": torch.tensor([0, 4]), "max_kv": 4}, "expected 3 kv_offsets"),
    "row longer than max": ({"max_q": 2}, "max_kv"),
    "decreasing": ({"q_offsets": torch.tensor([0, 5, 4])}, "lengths from -1"),
    "offset dtype": ({"q_offsets": OFFSETS.float()}, "int32 or int64"),
    "activation": ({"activation": "glu"}, "gelu_tanh"),
    "taylor range": ({"activation": "gelu_taylor6", "scale": 2.0}, "1.25"),
    "max_kv missing": ({"kv_offsets": OFFSETS}, "max_kv is missing"),
    "dtype": ({"k": Q.half()}, "cast first"),
    "integer": ({"q": Q.int(), "k": Q.int(), "v": Q.int()}, "bf16"),
    "shape": ({"k": torch.zeros(4, 2, 4)}, "one shape"),
    "heads": ({"q": torch.zeros(4, 1, 8)}, "agree in"),
    "rank": ({"q": torch.zeros(4, 8)}, r"\[T, H, D\]"),
    "no q_offsets": ({"q_offsets": None}, "q_offsets is None"),
    "shared without keys": ({"shared_q": True}, "needs kv_offsets"),
    "shared max_q": ({"shared_q": True, "q_offsets": None, "kv_offsets": OFFSETS, "max_kv": 4, "max_q": 3}, "max_q =="),
    "shared offsets": ({"shared_q": True, "kv_offsets": OFFSETS, "max_kv": 4, "max_q": 4}, "arange"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_say_what_where_and_how(name):
    """K3, J3, J4: rows past the last offset, a wrong count and a row over the maximum are errors."""
    change, message = BAD[name]
    arguments = {"q": Q, "k": Q, "v": Q, "q_offsets": OFFSETS, "max_q": 4, **change}
    with pytest.raises(ValueError, match=message):
        gdpa(**arguments)


@pytest.mark.parametrize(("capability", "facts", "wanted"), [
    ((9, 0), {}, "gluon"), ((9, 0), {"shared_q": True}, "triton"), ((9, 0), {"head_dim": 96}, "triton"),
    ((10, 0), {}, "triton"), ((9, 0), {"head_dim": 80}, "reference"), ((9, 0), {"dtype": torch.float32}, "reference"),
])
def test_the_table_sends_own_queries_on_hopper_to_gluon(monkeypatch, capability, facts, wanted):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_capability", lambda index: capability)
    facts = {"dtype": torch.bfloat16, "head_dim": 64, "shared_q": False} | facts
    assert backend.implementation("gdpa", torch.device("cuda", 0), **facts) == wanted
