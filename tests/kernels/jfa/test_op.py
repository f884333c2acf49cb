"""The op on a CPU: the reference implementation against a naive fp64 loop, and everything around the kernels."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from opengem.kernels import backend
from opengem.kernels.jfa import reference
from opengem.kernels.jfa.op import PairBias, RelativeBias, jagged_flash_attention
from tests.kernels import grid
from tests.kernels.jfa import naive

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "window_left": {"window": (3, -1)},
    "window_right": {"window": (-1, 4)},
    "causal_window": {"causal": True, "window": (7, 9)},
    "pair": {"bias": "pair"},
    "relative": {"bias": "relative"},
    "relative_causal": {"bias": "relative", "causal": True},
}


def make(name, heads=4, kv_heads=2, dim=8, bias=None, dtype=torch.float64, seed=0, device="cpu"):
    """Leaves q, k, v and the bias tensor of a grid case, of a list of lengths, or of a pair of lists."""
    m, n = grid.case(name) if isinstance(name, str) else name if isinstance(name, tuple) else (name, name)
    torch.manual_seed(seed)
    q, k, v = torch.randn(sum(m), heads, dim), torch.randn(sum(n), kv_heads, dim), torch.randn(sum(n), kv_heads, dim)
    tensor = None
    if bias == "pair":
        tensor = torch.randn(heads, sum(a * b for a, b in zip(m, n, strict=True)))
    elif bias == "relative":
        tensor = torch.randn(heads, 13)
    return [None if x is None else x.to(device, dtype).requires_grad_() for x in (q, k, v, tensor)], m, n


def run(leaves, m, n, bias=None, **options):
    q, k, v, tensor = leaves
    bias = {"pair": PairBias, "relative": RelativeBias}[bias](tensor) if bias else None
    return jagged_flash_attention(
        q, k, v, grid.offsets(m, q.device), grid.offsets(n, q.device), max_q=max(m, default=0),
        max_kv=max(n, default=0), bias=bias, return_lse=True, **options)


def truth(leaves, m, n, bias=None, **options):
    bias = {"pair": PairBias, "relative": RelativeBias}[bias](leaves[3]) if bias else None
    return naive.attention(*leaves[:3], m, n, bias=bias, **options)


def gradients(out, lse, leaves):
    """Of a fixed random weighting of the outputs; rows without keys have log-sum-exp -inf and take no part."""
    torch.manual_seed(1)
    wo, wl = torch.randn(out.shape).to(out.device), torch.randn(lse.shape).to(out.device)
    loss = (out * wo).sum() + torch.where(lse.isinf(), 0, lse * wl).sum()
    return torch.autograd.grad(loss, [x for x in leaves if x is not None], materialize_grads=True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", grid.LENGTHS)
def test_matches_the_naive_loop(name, option, poisoned_empty):
    options = OPTIONS[option]
    leaves, m, n = make(name, bias=options.get("bias"))
    got, want = run(leaves, m, n, **options), truth(leaves, m, n, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(gradients(*got, leaves), gradients(*want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("option", ["causal_window", "pair", "relative"])
def test_small_chunks_change_nothing(option, monkeypatch):
    """Samples split over chunks and queries over blocks."""
    options = OPTIONS[option]
    leaves, m, n = make("unsorted", bias=options.get("bias"))
    want = truth(leaves, m, n, **options)
    monkeypatch.setattr(reference, "SCORES", 900)
    got = run(leaves, m, n, **options)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for a, b in zip(gradients(*got, leaves), gradients(*want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("radius", [0, 1, 40])
def test_relative_bias_radius(radius):
    leaves, m, n = make("long_q_short_kv")
    leaves[3] = torch.randn(4, 2 * radius + 1, dtype=torch.float64, requires_grad=True)
    got, want = run(leaves, m, n, "relative"), truth(leaves, m, n, "relative")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for a, b in zip(gradients(*got, leaves), gradients(*want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("option", ["plain", "causal_window", "pair", "relative"])
def test_gradcheck(option):
    options = dict(OPTIONS[option])
    leaves, m, n = make("zero_q", heads=2, kv_heads=1, dim=3, bias=options.get("bias"))
    live = [x for x in leaves if x is not None]

    def loss(*tensors):
        out, lse = run([*tensors, None][:4], m, n, **options)
        return out, torch.where(lse.isinf(), 0, lse)

    assert torch.autograd.gradcheck(loss, live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_near(dtype):
    leaves, m, n = make("tile_edges_64", dim=32, dtype=dtype)
    out, lse = run(leaves, m, n, causal=True)
    want, want_lse = truth(leaves, m, n, causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.double() - want).abs().max() < {torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_samples_do_not_see_each_other():
    """Two samples of one row: the output of each is its own value, exactly."""
    leaves, m, n = make("two_singles", heads=2, dtype=torch.float32)
    out, _ = run(leaves, m, n)
    assert torch.equal(out, leaves[2])


@pytest.mark.parametrize("window", [(2, 0), (9, 0), (-1, 0)])
def test_a_window_includes_the_token_itself(window):
    """left = w - 1 shows the token and w - 1 before it; a window as long as the sample is plain causal."""
    (q, k, v, _), _, _ = make("one_token", heads=1, kv_heads=1)
    q, k = torch.zeros(3, 1, 8), torch.zeros(3, 1, 8)
    v = torch.eye(3, 8)[:, None]
    out = jagged_flash_attention(q, k, v, grid.offsets([3]), max_q=3, window=window)
    causal = jagged_flash_attention(q, k, v, grid.offsets([3]), max_q=3, causal=True)
    assert torch.equal(out, causal)
    near = jagged_flash_attention(q, k, v, grid.offsets([3]), max_q=3, window=(1, 0))
    assert near[2, 0, :3].tolist() == [0, 0.5, 0.5]


def test_a_sample_does_not_depend_on_batch_mates():
    leaves, m, n = make("unsorted", dtype=torch.float32)
    alone, _ = jagged_flash_attention(
        *(x[17 : 17 + 111] for x in leaves[:3]), grid.offsets([111]), max_q=111, return_lse=True)
    out, _ = run(leaves, m, n)
    torch.testing.assert_close(out[17 : 17 + 111], alone, rtol=1e-6, atol=1e-6)


def test_a_nan_in_one_sample_stays_there():
    leaves, m, n = make("unsorted", dtype=torch.float32)
    with torch.no_grad():
        for x in leaves[:3]:
            x[17 : 17 + 111] = float("nan")
    out, _ = run(leaves, m, n)
    grads = torch.autograd.grad(out.sum(), leaves[:3])
    rest = torch.cat([torch.arange(17), torch.arange(17 + 111, sum(m))])
    assert all(x[rest].isfinite().all() for x in (out, *grads))


def test_same_bits_every_time():
    leaves, m, n = make("giant_among_tiny", bias="relative", dtype=torch.float32)
    runs = []
    for _ in range(3):
        out, lse = run(leaves, m, n, "relative", causal=True)
        runs.append([out, lse, *gradients(out, lse, leaves)])
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_strided_views_and_int32_offsets():
    q, k, v = grid.fused_views(17 + 30, 2, 16)
    lengths = [17, 0, 30]
    want = jagged_flash_attention(*(x.contiguous() for x in (q, k, v)), grid.offsets(lengths), max_q=30)
    got = jagged_flash_attention(q, k, v, grid.offsets(lengths, dtype=torch.int32), max_q=30)
    assert torch.equal(got, want)


def test_opcheck():
    leaves, m, n = make("zero_between", bias="pair", dtype=torch.float32)
    q, k, v, bias = leaves
    args = (q, k, v, grid.offsets(m), grid.offsets(n), bias, False, 5, 5, 0.3, -1, 0)
    torch.library.opcheck(torch.ops.opengem.jfa_fwd.default, args)


def test_compiles_without_graph_breaks_or_recompiles():
    def step(q, k, v, offsets, table):
        out, lse = jagged_flash_attention(q, k, v, offsets, max_q=64, bias=RelativeBias(table), return_lse=True)
        return out.sin(), lse

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 6], [7, 0, 20], [1, 2, 3, 64]):
        total = sum(lengths)
        args = [torch.randn(total, 2, 8, requires_grad=True) for _ in range(3)]
        args += [grid.offsets(lengths), torch.randn(2, 9, requires_grad=True)]
        got, want = compiled(*args), step(*args)
        torch.testing.assert_close(got, want)
        leaves = [args[0], args[4]]
        grads = [torch.autograd.grad(out.sum(), leaves) for out in (got[0], want[0])]
        torch.testing.assert_close(*grads)
    assert counter.frame_count == 1


def _inputs(**changes):
    x = torch.zeros(4, 2, 8)
    return {"q": x, "k": x, "v": x, "q_offsets": grid.offsets([1, 3])} | changes


@pytest.mark.parametrize(("changes", "options", "message"), [
    ({"q": torch.zeros(4, 16)}, {}, "q must be"),
    ({"k": torch.zeros(4, 2, 4)}, {}, "k and v must be"),
    ({"v": torch.zeros(4, 2, 8).half()}, {}, "v must be a float tensor like q"),
    ({"q": torch.zeros(4, 3, 8)}, {}, "multiple"),
    ({"q_offsets": torch.tensor([0.0, 4.0])}, {}, "q_offsets must be int32 or int64"),
    ({"kv_offsets": grid.offsets([4])}, {}, "expected 3 offsets as in q_offsets, got 2"),
    ({"q_offsets": grid.offsets([1, 2])}, {}, "q has 4 rows, q_offsets run from 0 to 3"),
    ({"q_offsets": torch.tensor([0, 5, 4])}, {"max_q": 9}, "lengths from -1 to 5"),
    ({}, {"max_q": 2}, r"lengths from 1 to 3 \(sample 1\), wanted 0 to 2 \(max_q\)"),
    ({}, {"window": (-2, 0)}, "window must be"),
    ({}, {"scale": 0.0}, "scale must be a positive number"),
    ({}, {"bias": torch.zeros(2, 3)}, "bias must be PairBias"),
    ({}, {"bias": PairBias(torch.zeros(1, 10))}, "one row per query head"),
    ({}, {"bias": PairBias(torch.zeros(2, 9))}, "= 10 columns, got 9"),
    ({}, {"bias": RelativeBias(torch.zeros(2, 4))}, "odd number, got 4"),
])
def test_errors_name_what_is_wrong(changes, options, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        jagged_flash_attention(**_inputs(**changes), **({"max_q": 3} | options))


def test_a_row_behind_the_offsets_is_an_error(poisoned_empty):
    """Otherwise its gradient would be whatever the allocator left there."""
    x = torch.randn(3, 1, 8, requires_grad=True)
    with pytest.raises(ValueError, match="3 rows"):
        jagged_flash_attention(x, x, x, grid.offsets([2]), max_q=2)


def test_65536_samples_of_one_row():
    v = torch.randn(65536, 1, 8)
    offsets = torch.arange(65537)
    assert torch.equal(jagged_flash_attention(v, v, v, offsets, max_q=1), v)


@pytest.mark.parametrize(("capability", "facts", "wanted"), [
    ((9, 0), {}, "gluon"), ((9, 0), {"bias": "pair"}, "triton"), ((9, 0), {"head_dim": 96}, "triton"),
    ((9, 0), {"bias": "relative"}, "triton"),
    ((10, 0), {}, "triton"), ((9, 0), {"dtype": torch.float32}, "reference"),
    ((8, 0), {}, "reference"),
])
def test_the_table_sends_what_tma_reads_on_hopper_to_gluon(monkeypatch, capability, facts, wanted):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_capability", lambda index: capability)
    usual = {"dtype": torch.bfloat16, "head_dim": 128, "bias": "none"}
    assert backend.implementation("jfa", torch.device("cuda", 0), **usual | facts) == wanted
