"""Lookup and update against loops in float64: plain torch here; the kernels on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from opengem.kernels import backend
from opengem.sparse import noise
from opengem.sparse.lookup import op
from opengem.sparse.lookup.optimiser import Optimiser

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_kernels = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
implementations = pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=needs_kernels)])
TABLE_ROWS = [7, 40, 3]

LENGTHS = {  # three features of as many bags
    "ordinary": [3, 0, 5, 1, 2, 0, 0, 9, 1, 4, 0, 2],
    "all_empty": [0] * 6,
    "no_samples": [],
    "one_long_bag": [300, 0, 0],
    "only_one_feature_has_ids": [0, 0, 5, 7, 0, 0],
}


def problem(name: str, dim: int, dtype=torch.float32, hot: bool = False, weighted: bool = False, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS[name], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    each = len(lengths) // 3
    rows = torch.tensor(TABLE_ROWS).repeat_interleave(each).repeat_interleave(lengths)
    ids = rows - 1 if hot else (torch.rand(len(rows), generator=g) * rows).long()
    first = torch.tensor([0, 7, 47])
    weight = torch.randn(50, dim, generator=g).to(dtype)
    weights = torch.rand(len(ids), generator=g) + 0.5 if weighted else None
    return [None if t is None else t.to(DEVICE) for t in (weight, ids, offsets, first, weights)]


def bags(offsets, first):
    """(feature, begin, end) of every bag."""
    each = max((len(offsets) - 1) // len(first), 1)
    return [(b // each, int(offsets[b]), int(offsets[b + 1])) for b in range(len(offsets) - 1)]


def lookup_loop(weight, ids, offsets, first, weights, pooling):
    out = []
    for feature, begin, end in bags(offsets, first):
        rows = weight[first[feature] + ids[begin:end]].double()
        if pooling == "none":
            out.append(rows)
            continue
        factors = torch.ones(end - begin, device=rows.device) if weights is None else weights[begin:end]
        total = (rows * factors[:, None].double()).sum(0)
        out.append((total / max(end - begin, 1) if pooling == "mean" else total)[None])
    return torch.cat(out) if out else torch.empty(0, weight.shape[1], device=weight.device).double()


def gradients_loop(weight, ids, offsets, first, weights, pooling, grads):
    """float64 [R, D]: the gradient of every row."""
    total = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
    for bag, (feature, begin, end) in enumerate(bags(offsets, first)):
        for p in range(begin, end):
            grad = grads[p if pooling == "none" else bag].double()
            grad = grad * (1.0 if weights is None else float(weights[p]))
            total[first[feature] + ids[p]] += grad / (end - begin if pooling == "mean" else 1)
    return total


MODES = [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("none", False)]


@implementations
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("pooling, weighted", MODES)
def test_forward(implementation, name, pooling, weighted):
    weight, ids, offsets, first, weights = problem(name, 20, weighted=weighted)
    with backend.force(implementation):
        out = op.lookup(weight, ids, offsets, first, pooling=pooling, sample_weights=weights)
    wanted = lookup_loop(weight, ids, offsets, first, weights, pooling)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@implementations
@pytest.mark.parametrize("dim", [4, 64, 96, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_forward_dims_and_dtypes(implementation, dim, dtype, pooling):
    weight, ids, offsets, first, weights = problem("ordinary", dim, dtype)
    with backend.force(implementation):
        out = op.lookup(weight, ids, offsets, first, pooling=pooling, dtype=dtype)
    assert out.dtype == dtype
    wanted = lookup_loop(weight, ids, offsets, first, weights, pooling).to(dtype)
    rtol, atol = (0, 0) if pooling == "none" else (1e-2, 1e-5)
    torch.testing.assert_close(out, wanted, rtol=rtol, atol=atol)


def step_loop(optimiser, weight, state, grad, lr, step):
    """Row by row in float64; rows with no gradient stay."""
    for row in grad.abs().sum(1).nonzero().flatten().tolist():
        g = grad[row]
        if optimiser.kind == "sgd":
            weight[row] -= lr * g
        elif optimiser.kind == "adagrad":
            state["moment"][row] += g.square().mean()
            weight[row] -= lr * g / ((optimiser.moment_scale * state["moment"][row]).sqrt() + optimiser.eps)
        else:
            b1, b2 = optimiser.betas
            state["mean"][row] = b1 * state["mean"][row] + (1 - b1) * g
            state["moment"][row] = b2 * state["moment"][row] + (1 - b2) * g.square().mean()
            mean, moment = state["mean"][row] / (1 - b1**step), state["moment"][row] / (1 - b2**step)
            weight[row] -= lr * mean / (moment.sqrt() + optimiser.eps)


OPTIMISERS = {
    "sgd": Optimiser("sgd"),
    "adagrad": Optimiser("adagrad"),
    "scaled": Optimiser("adagrad", eps=1e-3, moment_scale=0.25),
    "adam": Optimiser("adam", betas=(0.8, 0.9)),
}


def run_steps(implementation, optimiser, pooling, given, steps=2, dtype=torch.float32, rounding=None):
    weight, ids, offsets, first, weights = given
    weight, state = weight.clone(), optimiser.state(*weight.shape, weight.device)
    truth, truth_state = weight.double(), {k: v.double() for k, v in state.items()}
    with backend.force(implementation):
        for step in range(1, steps + 1):
            count = len(ids) if pooling == "none" else len(offsets) - 1
            g = torch.Generator().manual_seed(step)
            grads = torch.randn(count, weight.shape[1], generator=g).to(weight.device, dtype)
            order = op.sort_ids(weight, ids, offsets, first, pooling=pooling, sample_weights=weights)
            op.update(weight, state, order, grads, optimiser, lr=0.1, step=step, rounding=rounding)
            total = gradients_loop(weight, ids, offsets, first, weights, pooling, grads)
            step_loop(optimiser, truth, truth_state, total, 0.1, step)
    return weight, state, truth, truth_state


@implementations
@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize("pooling, weighted", MODES)
def test_update(implementation, kind, pooling, weighted):
    given = problem("ordinary", 20, weighted=weighted)
    weight, state, truth, truth_state = run_steps(implementation, OPTIMISERS[kind], pooling, given)
    torch.testing.assert_close(weight.double(), truth, rtol=1e-4, atol=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor.double(), truth_state[name], rtol=1e-4, atol=1e-5)


@implementations
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("hot", [False, True])
def test_update_of_empty_and_hot_inputs(implementation, name, hot):
    """Nothing at all, one hot row only, a segment longer than the cut."""
    weight, state, truth, _ = run_steps(implementation, Optimiser(), "none", problem(name, 8, hot=hot), steps=1)
    torch.testing.assert_close(weight.double(), truth, rtol=1e-4, atol=1e-5)


@implementations
@pytest.mark.parametrize(
    "counts",
    [[5000], [127, 129, 128, 1], [1, 256, 3, 384, 2200], [128, 128], [130, 2300, 7], [4, 5, 4, 113, 2, 1, 5]],
)
def test_segments_across_cuts(implementation, counts):
    """Rows with more duplicates than a piece holds, at, before and behind its edges; 2,300 span more than 16."""
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))].to(DEVICE)
    weight, dim = torch.zeros(len(counts) + 2, 4, device=DEVICE), 4
    grads = torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with backend.force(implementation):
        op.update(weight, {}, op.sort_rows(weight, rows), grads, Optimiser("sgd"), lr=1.0, step=1)
    wanted = torch.zeros_like(weight).double().index_add(0, rows, -grads.double())
    torch.testing.assert_close(weight.double(), wanted, rtol=1e-5, atol=1e-4)


@implementations
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_16_bit_rows_follow_the_noise_of_row_step_and_column(implementation, dtype):
    """Each row goes to a neighbour of the exact value; the draw is that of the numbered row wherever it lies."""
    given = problem("ordinary", 8, dtype)
    runs = [(100, 0), (5000, 7), (2**33, 47)]
    rounding = noise.Rounding.of(runs, DEVICE)
    weight, _, _, _ = run_steps(implementation, Optimiser("sgd"), "none", given, steps=1, rounding=rounding)
    start, ids, offsets, first, _ = given
    grads = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = start.float() - 0.1 * gradients_loop(start, ids, offsets, first, None, "none", grads).float()
    rows = torch.arange(50, device=DEVICE)
    touched = torch.zeros(50, dtype=torch.bool, device=DEVICE)
    for feature, begin, end in bags(offsets, first):
        touched[first[feature] + ids[begin:end]] = True
    wanted = torch.where(touched[:, None], rounding(exact, rows, dtype, 1), start)
    assert (weight != wanted).float().mean() < 0.02  # sums in another order may cross a rounding edge
    assert torch.equal(weight[~touched], start[~touched])


@implementations
def test_two_tables_and_two_steps_draw_different_noise(implementation):
    weight = torch.full((2, 64), 1.0, dtype=torch.float16, device=DEVICE)
    rounding = noise.Rounding.of([(0, 0), (10, 1)], DEVICE)
    rows, third = torch.tensor([0, 1], device=DEVICE), torch.full((2, 64), -(2.0**-10) / 3, device=DEVICE)
    seen = []
    for step in (1, 1, 2):
        copy = weight.clone()
        with backend.force(implementation):
            order = op.sort_rows(copy, rows)
            op.update(copy, {}, order, third, Optimiser("sgd"), lr=1.0, step=step, rounding=rounding)
        seen.append(copy)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])
    assert 5 < int((seen[0] > 1).sum()) < 90


@implementations
def test_the_same_input_gives_the_same_bits(implementation):
    given = problem("one_long_bag", 16)
    runs = [run_steps(implementation, Optimiser(), "none", given)[0] for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_wrong_arguments_are_named():
    weight, ids, offsets, first, _ = problem("ordinary", 8)
    with pytest.raises(ValueError, match="3 features need offsets of length 3 [*] B [+] 1, got 12"):
        op.lookup(weight, ids, offsets[:-1], first, pooling="sum")
    with pytest.raises(ValueError, match="pooling 'max', wanted one of sum, mean, none"):
        op.lookup(weight, ids, offsets, first, pooling="max")
    with pytest.raises(ValueError, match="ids must be int64"):
        op.lookup(weight, ids.int(), offsets, first, pooling="sum")
    with pytest.raises(ValueError, match="sample_weights need pooling sum or mean"):
        op.lookup(weight, ids, offsets, first, pooling="none", sample_weights=ids.float())
    with pytest.raises(ValueError, match="1 <= D <= 1024"):
        op.lookup(weight.T, ids, offsets, first, pooling="sum")
    with pytest.raises(ValueError, match="sparse optimiser 'adamw': wanted one of sgd, adagrad, adam"):
        Optimiser("adamw")


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_rows_beyond_two_to_the_31_elements(pooling):
    """int32 addresses would wrap: 4.3 M rows of 512 in float16, of which the last and the first are used."""
    rows, dim = 2**22 + 100, 512
    weight = torch.zeros(rows, dim, dtype=torch.float16, device="cuda")
    weight[-1], weight[0] = 3.0, 1.0
    ids = torch.tensor([rows - 1, 0, rows - 1], device="cuda")
    offsets, first = torch.tensor([0, 2, 3], device="cuda"), torch.tensor([0], device="cuda")
    out = op.lookup(weight, ids, offsets, first, pooling=pooling)
    assert out[:, 0].tolist() == ([4.0, 3.0] if pooling == "sum" else [3.0, 1.0, 3.0])
    order = op.sort_ids(weight, ids, offsets, first, pooling=pooling)
    op.update(weight, {}, order, torch.ones_like(out), Optimiser("sgd"), lr=0.5, step=1)
    assert weight[-1].unique().tolist() == [2.0] and weight[0].unique().tolist() == [0.5]
    assert int(weight[1:-1].count_nonzero()) == 0


@pytest.mark.gpu
def test_new_totals_compile_nothing():
    """Throughput must not fall when the number of ids changes from step to step."""
    from opengem.sparse.lookup import triton as kernels

    def compiled() -> int:
        return sum(len(entry[0]) for entry in kernels.update_kernel.device_caches.values())

    def one(count: int) -> None:
        weight = torch.zeros(1000, 64, device="cuda")
        rows = torch.randint(1000, (count,), device="cuda")
        state = Optimiser().state(1000, 64, "cuda")
        grads = torch.randn(count, 64, device="cuda")
        op.update(weight, state, op.sort_rows(weight, rows), grads, Optimiser(), lr=0.1, step=count)

    one(1000)
    before = compiled()
    for count in (1, 16, 999, 1024, 4096, 5000):
        one(count)
    assert compiled() == before


@pytest.mark.gpu
def test_no_host_sync():
    weight, ids, offsets, first, _ = problem("ordinary", 64)
    state, optimiser = Optimiser().state(50, 64, "cuda"), Optimiser()
    rounding = noise.Rounding.of([(0, 0)], "cuda")
    for strict in (False, True):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            out = op.lookup(weight, ids, offsets, first, pooling="sum")
            order = op.sort_ids(weight, ids, offsets, first, pooling="sum")
            op.update(weight, state, order, out, optimiser, lr=0.1, step=1, rounding=rounding)
        finally:
            torch.cuda.set_sync_debug_mode("default")
