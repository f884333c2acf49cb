"""What a benchmark case is: inputs, our op, its peers on the same inputs, and the useful FLOPs and bytes to count."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from opengem.errors import UserError

OPS = ("jfa", "gdpa", "block", "norm", "rope", "swiglu", "mx", "jagged")


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    make(device, seed) returns the inputs, random normal, leaves that want a gradient with requires_grad set. `ours` and
    every peer take exactly those inputs and return one tensor (a peer that is not installed raises ImportError).
    FLOPs and bytes are those of the useful work alone: no padding, no recomputation beyond the x2.5 convention.
    counted: how the bytes are counted, printed before the rows.
    same_function: peers compute the same function, so their results are compared with ours, but for those in `unlike`.
    """

    op: str
    name: str
    shape: dict
    make: Callable[[torch.device, int], tuple]
    ours: Callable[..., Tensor]
    fwd_flops: int = 0
    bwd_flops: int = 0
    fwd_bytes: int = 0
    bwd_bytes: int = 0
    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    tolerance: float = 2e-2
    same_function: bool = True
    unlike: tuple[str, ...] = ()
    counted: str = ""


@cache
def compiled(function: Callable) -> Callable:
    """torch.compile of `function`, a peer whose backward can be run again and again."""
    importlib.import_module("torch._functorch.config").donated_buffer = False
    return torch.compile(function, dynamic=False)


def cases(op: str) -> list[Case]:
    """Every case of an op, in the order of its table."""
    if op not in OPS:
        raise UserError(f"bench: no op {op!r}; known: {', '.join(OPS)}")
    return importlib.import_module(f"benchmarks.kernels.{op}").cases()
