"""Schedule, clipping and weight-decay groups of the dense optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opengem.config import OptimConfig
from opengem.optim import clip_gradients, dense_optimizer, rate


def test_rate_warms_up_then_falls_to_the_final_fraction():
    config = OptimConfig(warmup_steps=10, final_lr_fraction=0.25)
    assert rate(0, 100, config) == pytest.approx(0.1)
    assert rate(9, 100, config) == pytest.approx(1 - 0.75 * 9 / 100)
    assert rate(100, 100, config) == pytest.approx(0.25)
    assert rate(500, 100, config) == pytest.approx(0.25)
    assert rate(50, 100, OptimConfig(warmup_steps=0)) == 1.0


def test_clip_measures_the_norm_and_zero_means_no_clipping():
    model = nn.Linear(1, 2, bias=False)
    model.weight.grad = torch.tensor([[3.0], [4.0]])
    assert clip_gradients(model, 0).item() == pytest.approx(5)
    assert model.weight.grad.norm().item() == pytest.approx(5)
    assert clip_gradients(model, 1.0).item() == pytest.approx(5)
    assert model.weight.grad.norm().item() == pytest.approx(1, rel=1e-4)


def test_only_matrices_decay():
    model = nn.Linear(2, 2)
    groups = dense_optimizer(model, OptimConfig(weight_decay=0.1), torch.device("cpu")).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert decay == {id(model.weight): 0.1, id(model.bias): 0.0}
