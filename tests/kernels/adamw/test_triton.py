"""One launch for all parameters against torch's AdamW: on a GPU in 16 bit, in Triton's interpreter in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opengem.config import OptimConfig
from opengem.kernels import backend
from opengem.kernels.adamw.op import clear
from opengem.optim import Copies, dense_optimizer, gradient_norm, update
from tests.kernels.interpret import DEVICE, GPU, needs_kernels


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


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_step_does_not_wait_for_the_device():
    _trained(DEVICE, torch.bfloat16, True)
    torch.manual_seed(0)
    module = nn.Linear(70, 70).to(DEVICE)
    optimizer, copies = dense_optimizer(module, OptimConfig()), Copies(module, torch.bfloat16)
    grads = {p: torch.randn_like(p, dtype=torch.bfloat16) for p in module.parameters()}
    norm, skip = gradient_norm(list(grads.values())), torch.zeros((), device=DEVICE)
    update(optimizer, grads, copies, 0.01, norm, 1.0, skip)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(optimizer, grads, copies, 0.01, norm, 1.0, skip)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_kernels
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_numbers_are_cleared_only_if_the_flag_is_set(kind, size):
    with backend.force(kind):
        for flag in (0.0, 1.0):
            x = torch.full((size,), float("nan"), device=DEVICE)
            clear(x, torch.tensor(flag, device=DEVICE))
            assert bool((x == 0).all()) if flag else bool(x.isnan().all())
