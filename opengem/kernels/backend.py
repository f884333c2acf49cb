"""Which implementation of an op runs where: one table, read by every op and printed by `opengem doctor`.

The choice depends on the device, the dtype and host-known shape facts (head dimension, options), never on data, so it
is the same on every rank and in every step. A test forces one with `with backend.force("triton"):`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

IMPLEMENTATIONS = ("reference", "triton", "gluon")


@dataclass(frozen=True)
class Rule:
    """One row of the table: `implementation` is taken where `accepts(facts)` holds; `why` is shown to the user.

    `facts` holds what the op passed to `implementation` (for example head_dim=128, causal=True) plus `dtype`.
    """

    implementation: str
    why: str
    capability: tuple[int, int] = (8, 0)
    exact_capability: bool = False
    accepts: Callable[[dict], bool] = field(default=lambda facts: True)


# op -> rules, first match wins; "reference" always stands at the end. Each op's section is kept by its own folder's
# author; measured crossovers belong here with a pointer to benchmarks/results.
TABLE: dict[str, tuple[Rule, ...]] = {
    "sparse_lookup": (Rule("triton", "all tables in one launch; update fused with the sum of gradients"),),
}

_forced: list[str] = []  # a process-wide stack, not a context variable: autograd runs backward on its own threads


@contextlib.contextmanager
def force(implementation: str) -> Iterator[None]:
    """Run every op with this implementation inside the block, forward and backward (process-wide; for tests)."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"backend.force: got {implementation!r}, wanted one of {IMPLEMENTATIONS}")
    _forced.append(implementation)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def has_triton() -> bool:
    """Whether triton can be imported (it is absent on macOS and Windows)."""
    import importlib.util

    return importlib.util.find_spec("triton") is not None


def choose(op: str, device: torch.device, **facts) -> Rule:
    """The rule that applies to `op` on `device`; the reference rule where no other does."""
    if _forced:
        return Rule(_forced[-1], "forced")
    if device.type != "cuda":
        return Rule("reference", f"no kernels for device type {device.type}")
    if not has_triton():
        return Rule("reference", "triton is not installed")
    capability = _capability(device.index if device.index is not None else torch.cuda.current_device())
    for rule in TABLE.get(op, ()):
        fits = capability == rule.capability if rule.exact_capability else capability >= rule.capability
        if fits and rule.accepts(facts):
            return rule
    return Rule("reference", "no kernel takes this shape, dtype or option on this device")


def implementation(op: str, device: torch.device, **facts) -> str:
    """The name of the implementation ("reference", "triton" or "gluon") of `op` on `device`, from host-known facts."""
    return choose(op, device, **facts).implementation
