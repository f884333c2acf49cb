"""One cast of all parameters: the same numbers as a cast at each use, gradients in float32."""

from __future__ import annotations

import torch
from torch.func import functional_call

from opengem.model.cast import cast_parameters


def test_gradients_are_those_of_autocast():
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), torch.randn(5, 8)
    module[2].requires_grad_(False)
    grads = []
    for cast in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = functional_call(module, cast_parameters(module, torch.bfloat16), (x,)) if cast else module(x)
        out.float().square().sum().backward()
        grads.append([parameter.grad for parameter in module.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a is None and b is None) or (b.dtype == torch.float32 and torch.equal(a, b))


def test_an_unused_parameter_gets_no_gradient():
    module = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    cast_parameters(module, torch.bfloat16)["0.weight"].sum().backward()
    assert module[0].weight.grad is not None and module[1].weight.grad is None and module[0].bias.grad is None
