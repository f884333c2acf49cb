"""The multi-task loss: formulas in fp64, conditional labels, ESMM, and independence of how samples are split."""

from __future__ import annotations

import pytest
import torch

from opengem.data.batch import Batch
from opengem.data.schema import Label
from opengem.loss import Meter, multi_task_loss

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
