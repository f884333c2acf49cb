"""The losses: formulas in fp64, conditional labels, ESMM, contrasts, and independence of how samples are split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from opengem.data.batch import Batch
from opengem.data.schema import Feature, Label
from opengem.loss import Meter, in_batch_softmax, multi_task_loss
from tests.sparse.workers import spawn

LABELS = (Label("click"), Label("convert", given="click"))


def _batch(n=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    click = (torch.rand(n, generator=g) < 0.4).float()
    convert = click * (torch.rand(n, generator=g) < 0.5).float()
    zeros = torch.zeros(n, dtype=torch.int64)
    labels = {"click": click, "convert": convert}
    return Batch({}, {}, labels, torch.rand(n, generator=g) + 0.1, zeros, zeros)


def _logits(n=64, seed=1, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, generator=g) * spread for name in ("click", "convert")}


def _bce(p, y):
    return -(y * p.log() + (1 - y) * torch.log1p(-p))


def test_conditional_label_counts_only_where_its_condition_is_one():
    batch, logits = _batch(), _logits()
    p = {k: v.double().sigmoid() for k, v in logits.items()}
    w, m = batch.weights.double(), batch.labels["click"].double()
    wanted = (w * _bce(p["click"], m)).sum() / w.sum()
    wanted += 0.5 * (w * m * _bce(p["convert"], batch.labels["convert"].double())).sum() / (w * m).sum()
    got = multi_task_loss(logits, batch, LABELS, {"convert": 0.5})
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_esmm_trains_the_product_on_every_sample():
    batch, logits = _batch(), _logits()
    p = {k: v.double().sigmoid() for k, v in logits.items()}
    w = batch.weights.double()
    both = p["click"] * p["convert"]
    wanted = (w * (_bce(p["click"], batch.labels["click"]) + _bce(both, batch.labels["convert"]))).sum() / w.sum()
    got = multi_task_loss(logits, batch, LABELS, {}, esmm=True)
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_esmm_is_finite_for_extreme_logits():
    batch, logits = _batch(), {k: v.requires_grad_() for k, v in _logits(spread=80.0).items()}
    loss = multi_task_loss(logits, batch, LABELS, {}, esmm=True)
    loss.backward()
    assert loss.isfinite()
    assert all(v.grad.isfinite().all() for v in logits.values())


@pytest.mark.parametrize("cut", [0, 1, 20, 63])
def test_any_split_of_the_samples_gives_the_same_gradient(cut):
    """Mean of means: a batch cut in two unequal parts must weigh every sample as before."""
    batch, whole = _batch(), {k: v.double().requires_grad_() for k, v in _logits().items()}
    multi_task_loss(whole, batch, LABELS, {}).backward()
    sums = {"click": batch.weights.sum(), "convert": (batch.weights * batch.labels["click"]).sum()}
    parts = {k: v.detach().clone().requires_grad_() for k, v in whole.items()}
    for rows in (slice(0, cut), slice(cut, 64)):
        piece = Batch(
            {}, {}, {k: v[rows] for k, v in batch.labels.items()}, batch.weights[rows], batch.timestamps[rows],
            batch.rows[rows],
        )  # fmt: skip
        multi_task_loss({k: v[rows] for k, v in parts.items()}, piece, LABELS, {}, weight_sums=sums).backward()
    for name in whole:
        torch.testing.assert_close(parts[name].grad, whole[name].grad, rtol=1e-6, atol=1e-9)


def test_empty_batch_has_zero_loss():
    batch = _batch(0)
    logits = {k: torch.zeros(0, requires_grad=True) for k in ("click", "convert")}
    loss = multi_task_loss(logits, batch, LABELS, {})
    loss.backward()
    assert loss.item() == 0.0


SIDES = (
    Feature("product", rows=6, role="item"), Feature("kind", rows=2, role="item"),
    Feature("member", rows=4, role="user"),
)  # fmt: skip


def _pairs(n=40, dim=5, seed=0) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Vectors of both towers, and samples among which products, kinds, users and positives repeat."""
    g = torch.Generator().manual_seed(seed)
    features = {f.name: torch.randint(f.rows, (n,), generator=g) for f in SIDES}
    click = (torch.rand(n, generator=g) < 0.4).float() * torch.rand(n, generator=g).round(decimals=1)
    click[::7] = torch.nan
    user, item = (torch.randn(n, dim, generator=g).requires_grad_() for _ in range(2))
    return user, item, replace(_batch(n), features=features, labels={"click": click})


def _contrast_by_hand(user, item, batch, roles=("item", "user")) -> torch.Tensor:
    """In fp64, one sample and one contrast at a time."""
    weight = batch.weights.double() * batch.labels["click"].nan_to_num(0.0).double()
    total = 0.0 * (user.sum() + item.sum()).double()

    def same(i, j, role):
        names = [f.name for f in SIDES if f.role == role]
        return role in roles and all(batch.features[name][i] == batch.features[name][j] for name in names)

    for i in range(len(weight)):
        scores = [user[i].double() @ item[i].double()]
        for j in range(len(weight)):
            other_positive = same(i, j, "user") and batch.labels["click"][j] > 0
            if i != j and not same(i, j, "item") and not other_positive:
                scores.append(user[i].double() @ item[j].double())
        total = total + weight[i] * (torch.stack(scores).logsumexp(0) - scores[0])
    return total / max(weight.sum().item(), 1e-30)


@pytest.mark.parametrize("roles", [("item", "user"), ("item",), ("user",), ()])
@pytest.mark.parametrize("seed", range(3))
def test_in_batch_softmax_is_the_loop_over_samples_and_contrasts(seed, roles):
    """Without ids of the candidate all samples are contrasts, without ids of the user other positives are too."""
    user, item, batch = _pairs(seed=seed)
    features = [f for f in SIDES if f.role in roles]
    wanted = _contrast_by_hand(user, item, batch, roles)
    by_hand = torch.autograd.grad(wanted, (user, item))
    got = in_batch_softmax(user, item, batch, "click", features, room=1)
    assert got.dtype == torch.float32 and got.item() == pytest.approx(wanted.item(), rel=1e-5)
    for ours, theirs in zip(torch.autograd.grad(got, (user, item)), by_hand, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n, label", [(0, 1.0), (5, 0.0), (5, math.nan)])
def test_in_batch_softmax_without_a_positive_is_zero_with_zero_gradients(n, label, poisoned_empty):
    user, item, batch = _pairs(n)
    batch = replace(batch, labels={"click": torch.full((n,), label)})
    loss = in_batch_softmax(user, item, batch, "click", SIDES, room=8)
    loss.backward()
    assert loss.item() == 0
    assert not user.grad.any() and not item.grad.any()


def test_a_sample_without_a_contrast_costs_nothing():
    user, item, batch = _pairs(1)
    batch = replace(batch, labels={"click": torch.ones(1)})
    assert in_batch_softmax(user, item, batch, "click", SIDES, room=1).item() == 0


def _shared(rank: int, world: int, count: int, room: int) -> dict:
    """Loss and gradients of this process's rows; the message where they do not fit."""
    user, item, batch = _pairs(count)
    first, last = (count * r // world for r in (rank, rank + 1))
    mine = {name: {k: v[first:last] for k, v in getattr(batch, name).items()} for name in ("features", "labels")}
    rest = {name: getattr(batch, name)[first:last] for name in ("weights", "timestamps", "rows")}
    own = [x.detach()[first:last].requires_grad_() for x in (user, item)]
    try:
        loss = in_batch_softmax(*own, replace(batch, **mine, **rest), "click", SIDES, room)
    except ValueError as error:
        return {"error": str(error)}
    loss.backward()
    return {"loss": loss.item(), "user": own[0].grad, "item": own[1].grad}


def _several(rank: int, world: int, cases: list[tuple[int, int]]) -> list[dict]:
    return [_shared(rank, world, *case) for case in cases]


@pytest.mark.multi
def test_in_batch_softmax_of_two_processes_is_that_of_one():
    """Uneven shares, room to spare, a process without a sample, nobody with one, and too little room."""
    cases = [(41, 21), (40, 33), (1, 1), (0, 4), (40, 19)]
    parts = spawn(_several, 2, cases)
    for i, (count, _) in enumerate(cases[:-1]):
        pieces = [part[i] for part in parts]
        user, item, batch = _pairs(count)
        wanted = in_batch_softmax(user, item, batch, "click", SIDES, room=count)
        wanted.backward()
        assert sum(piece["loss"] for piece in pieces) == pytest.approx(wanted.item(), rel=1e-5)
        for name, grad in (("user", user.grad), ("item", item.grad)):
            torch.testing.assert_close(torch.cat([piece[name] for piece in pieces]), grad, rtol=1e-5, atol=1e-7)
    for rank, part in enumerate(parts):
        assert part[-1]["error"] == f"gather_padded: rank {rank} has 20 rows, each process has room for 19"


def test_meter_sums_batches():
    meter = Meter(LABELS, torch.device("cpu"))
    one, two = _batch(seed=3), _batch(seed=4)
    meter.add(_logits(seed=5), one)
    meter.add(_logits(seed=6), two)
    weight, loss, label, prediction = meter.read()["convert"]
    masks = [b.weights * b.labels["click"] for b in (one, two)]
    assert weight == pytest.approx(sum(m.sum().item() for m in masks), rel=1e-5)
    wanted = sum((m * b.labels["convert"]).sum().item() for m, b in zip(masks, (one, two), strict=True))
    assert label == pytest.approx(wanted, rel=1e-5)
    assert loss > 0
    assert prediction > 0
    meter.reset()
    assert meter.read()["click"] == (0, 0, 0, 0)
