"""Custom ops with little host time: what `torch.library.custom_op` does, at a small part of the cost of a call.

A call from plain eager code goes to the kernel (or to its `autograd.Function`) directly. The dispatcher, whose two ways
into Python cost more than all the rest, is asked only where somebody may be listening: a compiler, a dispatch mode
(fake tensors, FLOP counters), a torch function mode, a functional transform, a profiler, a tensor subclass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list}  # lists are of sizes
_LIBRARY = torch.library.Library("opengem", "FRAGMENT")


def define(name: str, run: Callable, fake: Callable, save: Callable | None = None, gradient: Callable | None = None):
    """A function that calls the op `opengem::<name>`: the annotations of `run` are its schema, its outputs new tensors.

    `fake(*args)` gives outputs of the right shape, `save(ctx, args, outputs)` and `gradient(ctx, *grads)` are as in
    `torch.library.register_autograd`; an op without them, like a second derivative, is an error in autograd.
    """
    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)

    def kernel(*args):
        with torch._C._DisableAutocast():  # the op's own products are in the dtype it chose
            return run(*args)

    def below(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _LIBRARY.impl(name, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"opengem::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.opengem, name).default
    direct = op
    if gradient is not None:
        direct = super(torch.autograd.Function, _function(kernel, save, gradient)).apply  # no transform is about
        dispatched = _function(below, save, gradient).apply

        def autograd(*args):
            return (dispatched if _wants_gradient(args) else below)(*args)

        _LIBRARY.impl(name, torch._disable_dynamo(autograd), "Autograd")

    def call(*args):
        if torch.compiler.is_compiling() or not _nobody_listens(args):
            return op(*args)
        return (direct if _wants_gradient(args) else kernel)(*args)

    return call


def _function(inner: Callable, save: Callable, gradient: Callable) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            outputs = inner(*args)
            save(ctx, args, outputs)
            return outputs

        backward = staticmethod(once_differentiable(gradient))

    return Function


def _wants_gradient(args: tuple) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def _nobody_listens(args: tuple) -> bool:
    return (_PLAIN.issuperset(map(type, args)) and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and torch._C._functorch.peek_interpreter_stack() is None and not torch.autograd._profiler_enabled())
