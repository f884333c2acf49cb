"""The Triton kernels, interpreted in fp32 on a CPU, against the naive fp64 loop; test_interpreted.py runs this file."""

from __future__ import annotations

import pytest
import torch

from opengem.kernels import backend
from tests.kernels import grid
from tests.kernels.jfa import test_op

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret or torch.cuda.is_available(), reason="runs with TRITON_INTERPRET=1 on a CPU")

SMALL = {"forward": (32, 16), "dq": (32, 16), "dkdv": (16, 32), "diagonals": (16, 16)}
LONG = ("tile_edges_64", "tile_edges_128", "giant_among_tiny", "unsorted", "long_q_short_kv", "short_q_long_kv")
MIXED = ([40, 0, 5], [33, 3, 50])  # more queries than keys, none, and fewer; several tiles each way


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles small enough that a short sample has several of them: full, on the edge of the mask, and ragged."""
    from opengem.kernels.jfa import triton as kernels

    small = {name: {d: kernels.Config(own, stream, 4, 1) for d in (32, 64, 128, 256)}
             for name, (own, stream) in SMALL.items()}
    monkeypatch.setattr(kernels, "CONFIGS", small)
    with backend.force("triton"):
        yield


def compare(name, option, **shape):
    options = test_op.OPTIONS[option]
    leaves, m, n = test_op.make(name, bias=options.get("bias"), dtype=torch.float32, **shape)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    got, want = test_op.run(leaves, m, n, **options), test_op.truth(exact, m, n, **options)
    got = [*got, *test_op.gradients(*got, leaves)]
    want = [*want, *test_op.gradients(*want, exact)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("option", ["plain", "causal_window"])
@pytest.mark.parametrize("name", [name for name in grid.LENGTHS if name not in LONG])
def test_every_edge_case(name, option, poisoned_empty):
    compare(name, option, heads=2, kv_heads=1, dim=16)


@pytest.mark.parametrize("option", test_op.OPTIONS)
def test_every_option(option, poisoned_empty):
    compare(MIXED, option, heads=2, kv_heads=1, dim=16)


def test_padded_head_dim():
    compare("zero_between", "causal", heads=2, kv_heads=2, dim=24)


@pytest.mark.parametrize("radius", [0, 1, 200])
def test_relative_bias_radius(radius):
    leaves, m, n = test_op.make(MIXED, dtype=torch.float32, heads=1, kv_heads=1, dim=16)
    leaves[3] = torch.randn(1, 2 * radius + 1, requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, want = test_op.run(leaves, m, n, "relative"), test_op.truth(exact, m, n, "relative")
    for a, b in zip(test_op.gradients(*got, leaves), test_op.gradients(*want, exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_minus_infinity_in_the_bias_hides_a_key():
    """Even where it hides all keys of a query."""
    leaves, m, n = test_op.make([20, 3], bias="pair", dtype=torch.float32, heads=1, kv_heads=1, dim=16)
    with torch.no_grad():
        leaves[3][:, : 20 * 2] = float("-inf")
    out, lse = test_op.run(leaves, m, n, "pair")
    grads = torch.autograd.grad(out.sum(), leaves)
    assert (out[:2] == 0).all() and lse[:, :2].isneginf().all()
    assert all(x.isfinite().all() for x in (out, *grads))


def test_rows_behind_the_offsets_get_zeros(poisoned_empty):
    q, k, v = (torch.randn(9, 1, 16) for _ in range(3))
    from opengem.kernels.jfa import triton as kernels
    from opengem.kernels.jfa.reference import Options

    offsets = grid.offsets([2, 3])
    out, lse = kernels.forward(q, k, v, offsets, offsets, None, 3, 3, Options(0.25))
    dout = torch.randn(9, 1, 16)
    grads = kernels.backward(dout, None, q, k, v, out, lse, offsets, offsets, None, 3, 3, Options(0.25))
    assert all((x[5:] == 0).all() and x.isfinite().all() for x in (out, *grads[:3]))


def test_a_nan_in_one_sample_stays_there():
    leaves, m, n = test_op.make("zero_between", dtype=torch.float32, heads=1, kv_heads=1, dim=16)
    with torch.no_grad():
        for x in leaves[:3]:
            x[3:8] = float("nan")
    out, _ = test_op.run(leaves, m, n)
    grads = torch.autograd.grad(out.sum(), leaves[:3])
    rest = torch.tensor([0, 1, 2, 8, 9])
    assert all(x[rest].isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("batch", [1, 17])
def test_hopper_backward_takes_samples_with_most_work_first(batch):
    """Records of key tiles: longest samples first, last keys first, and -1 for those of nobody; delta beside them."""
    from opengem.kernels.jfa import gluon_sm90_backward as kernels

    torch.manual_seed(batch)
    m, n = (torch.randint(0, 400, (batch,)).tolist() for _ in range(2))
    q_offsets, kv_offsets = grid.offsets(m), grid.offsets(n)
    rows, heads, dim = sum(m) + 3, 2, 16
    q_slots, slots = rows // 64 + batch + 1, (sum(n) + 3) // 128 + batch + 1
    out, stats = torch.randn(rows, heads, dim), torch.empty(heads, q_slots, 2, 64)
    records = torch.full((6, slots), -7, dtype=torch.int32)
    counters = torch.empty(heads * q_slots + 1, dtype=torch.int32)
    dk = torch.empty(sum(n) + 3, heads, dim)
    kernels._prepare_kernel[(slots + q_slots * heads, 1, 1)](
        out, out, torch.zeros(heads, rows), None, torch.empty_like(out), dk, dk.clone(), stats, counters, records,
        q_offsets, kv_offsets, heads * dim, heads * dim, rows, sum(n) + 3, batch, q_slots, slots, -1, -1, False, False,
        False, heads, heads, dim, 64, 128, 0)
    tiles = [(-(-a // 64), -(-b // 128)) for a, b in zip(m, n, strict=True)]
    want = [(int(kv_offsets[b]), n[b], tile, int(q_offsets[b]), m[b], int(q_offsets[b]) // 64 + b)
            for b in sorted(range(batch), key=lambda b: (-tiles[b][0] * tiles[b][1], b))
            for tile in reversed(range(tiles[b][1]))]
    found = [tuple(record) for record in records.T.tolist()]
    assert found[:len(want)] == want and all(record[2] == -1 for record in found[len(want):])
    for b in range(batch):
        for tile in range(tiles[b][0]):
            own = out[int(q_offsets[b]) + 64 * tile : min(int(q_offsets[b + 1]), int(q_offsets[b]) + 64 * tile + 64)]
            delta = stats[:, int(q_offsets[b]) // 64 + b + tile, 1, : len(own)]
            torch.testing.assert_close(delta, own.square().sum(-1).T)
