"""Custom ops with little host time: what `torch.library.custom_op` does, at a third of the cost of a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

_LIBRARY = torch.library.Library("opengem", "FRAGMENT")


def define(name: str, run: Callable, fake: Callable, save: Callable | None = None, gradient: Callable | None = None):
    """The op `opengem::<name>`, callable; the annotations of `run` are its schema, and its outputs are new tensors.

    `fake(*args)` gives outputs of the right shape, `save(ctx, args, outputs)` and `gradient(ctx, *grads)` are as in
    `torch.library.register_autograd`; an op without them, like a second derivative, is an error in autograd.
    """
    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)

    def kernel(*args):
        with torch._C._DisableAutocast():  # the op's own products are in the dtype it chose
            return run(*args)

    _LIBRARY.impl(name, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"opengem::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.opengem, name).default
    if gradient is None:
        return op

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            outputs = below(*args)
            save(ctx, args, outputs)
            return outputs

        backward = staticmethod(once_differentiable(gradient))

    def below(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def dispatch(*args):
        return (Function.apply if torch.is_grad_enabled() and torch._C._any_requires_grad(*args) else below)(*args)

    _LIBRARY.impl(name, torch._disable_dynamo(dispatch), "Autograd")
    return op
