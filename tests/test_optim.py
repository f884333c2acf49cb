"""Schedule, clipping and weight-decay groups of the dense optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opengem.config import OptimConfig
from opengem.optim import Copies, dense_optimizer, gradient_norm, rate, update


def test_rate_warms_up_then_falls_to_the_final_fraction():
    config = OptimConfig(warmup_steps=10, final_lr_fraction=0.25)
    assert rate(0, 100, config) == pytest.approx(0.1)
    assert rate(9, 100, config) == pytest.approx(1 - 0.75 * 9 / 100)
    assert rate(100, 100, config) == pytest.approx(0.25)
    assert rate(500, 100, config) == pytest.approx(0.25)
    assert rate(50, 100, OptimConfig(warmup_steps=0)) == 1.0


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (1.0, 0.2), (100.0, 1.0)])
def test_an_update_clips_to_the_limit_and_zero_means_no_clipping(limit, factor):
    stepped = []
    for grad, clip in ((torch.tensor([[3.0], [4.0]]), limit), (factor * torch.tensor([[3.0], [4.0]]), 0.0)):
        torch.manual_seed(0)
        model = nn.Linear(1, 2, bias=False)
        optimizer = dense_optimizer(model, OptimConfig(eps=1.0))  # so that a gradient's size tells in the step
        update(optimizer, {model.weight: grad}, None, 0.1, gradient_norm([grad]), clip, torch.zeros(()))
        stepped.append(model.weight.detach())
    torch.testing.assert_close(*stepped)


def test_an_update_that_is_skipped_changes_nothing_and_is_not_counted():
    model = nn.Linear(2, 2)
    optimizer, before = dense_optimizer(model, OptimConfig()), [p.detach().clone() for p in model.parameters()]
    grads = {parameter: torch.full_like(parameter, float("nan")) for parameter in model.parameters()}
    update(optimizer, grads, None, 0.1, gradient_norm(list(grads.values())), 1.0, torch.ones(()))
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in optimizer.state.values())


def test_a_skipped_update_does_not_stop_a_later_plain_step():
    model = nn.Linear(2, 2)
    optimizer, before = dense_optimizer(model, OptimConfig()), model.weight.detach().clone()
    grads = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}
    update(optimizer, grads, None, 0.1, gradient_norm(list(grads.values())), 1.0, torch.ones(()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_copies_follow_parameters_that_were_written_or_replaced():
    model = nn.Linear(2, 2, bias=False)
    copies = Copies(model, torch.bfloat16)
    for change in (lambda: model.weight.fill_(2.0), lambda: setattr(model.weight, "data", torch.full((2, 2), 3.0))):
        copies.named()
        with torch.no_grad():
            change()
        assert torch.equal(copies.named()["weight"], model.weight.to(torch.bfloat16))


def test_frozen_parameters_have_copies_without_gradients():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert {name: copy.requires_grad for name, copy in Copies(model, torch.bfloat16).named().items()} == {
        "weight": True, "bias": False}


def test_only_matrices_decay():
    model = nn.Linear(2, 2)
    groups = dense_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert decay == {id(model.weight): 0.1, id(model.bias): 0.0}


def test_gradients_of_copies_are_those_of_autocast():
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(5, 8)
    copies = Copies(module, torch.bfloat16)
    grads = []
    for parameters in ({}, copies.named()):
        with torch.autocast("cpu", torch.bfloat16):
            out = functional_call(module, parameters, (x,))
        out.float().square().sum().backward()
        grads.append([(copies.of[p] if parameters else p).grad for p in module.parameters()])
    for a, b in zip(*grads, strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a, b.float())


def test_copies_follow_whoever_writes_a_parameter():
    module = nn.Linear(3, 2)
    copies = Copies(module, torch.bfloat16)
    assert torch.equal(copies.named()["weight"], module.weight.bfloat16())
    module.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert bool((copies.named()["weight"] == 1).all())


def test_copies_follow_a_step_on_a_device_without_the_kernel_of_all_parameters():
    """PyTorch's fused step leaves the version of a parameter as it was: copies stayed, nothing learned in 16 bits."""
    model = nn.Linear(3, 2)
    optimizer, copies = dense_optimizer(model, OptimConfig()), Copies(model, torch.bfloat16)
    before = copies.named()["weight"].detach().clone()
    grads = {p: torch.ones_like(p) for p in model.parameters()}
    update(optimizer, grads, copies, 0.1, gradient_norm(list(grads.values())), 0.0, torch.zeros(()))
    after = copies.named()["weight"]
    assert torch.equal(after, model.weight.bfloat16()) and not torch.equal(after, before)
