"""Schedule, clipping and weight-decay groups of the dense optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opengem.config import OptimConfig
from opengem.kernels import backend
from opengem.kernels.adamw.op import clear
from opengem.optim import Copies, dense_optimizer, gradient_norm, rate, update
from tests.kernels.interpret import DEVICE, GPU, needs_kernels


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


def _trained(device, dtype, copied, steps=4):
    """Parameters, their state and their copies after some steps, the third one skipped, on the device."""
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(70, 70), nn.Linear(3, 2), nn.Linear(1, 1)]).to(device)
    parameters = list(module.parameters())
    optimizer = dense_optimizer(module, OptimConfig(weight_decay=0.1))
    copies = Copies(module, dtype) if copied else None
    for step in range(steps):
        numbers = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(step))
        parts = numbers.to(device, dtype if copied else torch.float32).split([p.numel() for p in parameters])
        grads = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}  # not all of them aligned
        skip = torch.tensor(float(step == 2), device=device)
        update(optimizer, grads, copies, 0.01 * (step + 1), gradient_norm(list(grads.values())), 1.0, skip)
    state = [list(optimizer.state[p].values()) for p in parameters]
    return [p.detach() for p in parameters], state, [] if copies is None else list(copies.named().values())


@needs_kernels
@pytest.mark.parametrize("copied", [False, True])
def test_all_parameters_in_one_launch_step_as_torch_steps_them(copied):
    dtype = torch.bfloat16 if GPU else torch.float32
    with backend.force("reference"):
        wanted = _trained(DEVICE, dtype, False)
    with backend.force("triton"):
        parameters, state, copies = _trained(DEVICE, dtype, copied)
    rounding = 1e-2 if copied and GPU else 1e-5  # of gradients in 16 bit
    torch.testing.assert_close(parameters, wanted[0], rtol=rounding, atol=rounding / 10)
    torch.testing.assert_close(state, wanted[1], rtol=rounding, atol=rounding / 10)
    assert all(torch.equal(copy, p.to(dtype)) for copy, p in zip(copies, parameters, strict=False))


@needs_kernels
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_numbers_are_cleared_only_if_the_flag_is_set(kind, size):
    with backend.force(kind):
        for flag in (0.0, 1.0):
            x = torch.full((size,), float("nan"), device=DEVICE)
            clear(x, torch.tensor(flag, device=DEVICE))
            assert bool((x == 0).all()) if flag else bool(x.isnan().all())
