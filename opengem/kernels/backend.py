"""Which implementation of an op runs where: one table, read by every op and printed by `opengem doctor`.

The choice depends on the device, the dtype and host-known shape facts (head dimension, options), never on data, so it
is the same on every rank and in every step. A test forces one with `with backend.force("triton"):`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

IMPLEMENTATIONS = ("reference", "triton", "gluon")
HALF = (torch.bfloat16, torch.float16)


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
    # Tiles fill the shared memory of data-centre GPUs; smaller parts (8.x, 12.x) could not launch them.
    "jfa": (
        Rule("gluon", "no bias, head_dim 64 or 128: fed by TMA", (9, 0),
             exact_capability=True,
             accepts=lambda f: f["dtype"] in HALF and f["bias"] == "none" and f["head_dim"] in (64, 128)),
        *(Rule("triton", "bf16 or fp16, head_dim a multiple of 8 up to 256", capability, exact_capability=True,
               accepts=lambda f: f["dtype"] in HALF and f["head_dim"] <= 256 and f["head_dim"] % 8 == 0)
          for capability in ((9, 0), (10, 0), (10, 3))),
    ),
    "gdpa": (
        Rule("gluon", "own queries, head_dim 64 or 128: fed by TMA", (9, 0), exact_capability=True,
             accepts=lambda f: f["dtype"] in HALF and f["head_dim"] in (64, 128) and not f["shared_q"]),
        Rule("triton", "bf16 or fp16, head_dim 32, 64, 96, 128 or 256",
             accepts=lambda f: f["dtype"] in HALF and f["head_dim"] in (32, 64, 96, 128, 256)),
    ),
    "block": (
        Rule("gluon", "16-bit blocks of 64, head dim 64 or 128: rows by TMA", (9, 0), exact_capability=True,
             accepts=lambda f: f["dtype"] in HALF and f["head_dim"] in (64, 128) and f["block"] == 64),
        Rule("triton", "16-bit blocks of 64, head dim 64 or 128: one tile a program", capability=(9, 0),
             accepts=lambda f: f["dtype"] in HALF and f["head_dim"] in (64, 128) and f["block"] == 64),
    ),
    "rope": (Rule("triton", "one pass over 16-bit rows, head dim a power of two", capability=(9, 0),
                  accepts=lambda f: f["dtype"] in HALF and f["head_dim"] in (16, 32, 64, 128, 256)),),
    "norm": (
        Rule("gluon", "quantised 16-bit rows, width a multiple of 16 up to 8,192: rows by TMA", (9, 0),
             exact_capability=True,
             accepts=lambda f: f["dtype"] in HALF and f["quantize"] and f["width"] % 16 == 0 and f["width"] <= 8192),
        Rule("triton", "16-bit rows up to 8,192 wide, one read", capability=(9, 0),
             accepts=lambda f: f["dtype"] in HALF and f["width"] <= 8192),
    ),
    "mx": (Rule("triton", "32x32 blocks of E4M3 from 16 bit or fp32", capability=(9, 0),
                accepts=lambda f: f["block"] == (32, 32) and f["format"] == "e4m3" and f["dtype"] != torch.float64),),
    "swiglu": (Rule("triton", "one pass over 16-bit gate and up", capability=(9, 0),
                    accepts=lambda f: f["dtype"] in HALF),),
    "jagged_ops": (Rule("triton", "16-bit rows: one read, one write, no index tensors", capability=(9, 0),
                        accepts=lambda f: f["dtype"] in HALF),),
    "pool": (Rule("triton", "16-bit rows up to 1,024 wide: heads joined, seeds normed in one pass", capability=(9, 0),
                  accepts=lambda f: f["dtype"] in HALF and f["width"] <= 1024),),
    "chain": (Rule("triton", "16-bit rows up to 1,024 wide, two norms in one read", capability=(9, 0),
                   accepts=lambda f: f["dtype"] in HALF and f["width"] <= 1024),),
    "adamw": (Rule("triton", "all parameters and their 16-bit copies in one launch", capability=(9, 0)),),
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
    return _first_that_fits(op, capability, tuple(facts.items()))


@cache
def _first_that_fits(op: str, capability: tuple[int, int], facts: tuple[tuple[str, Hashable], ...]) -> Rule:
    for rule in TABLE.get(op, ()):
        fits = capability == rule.capability if rule.exact_capability else capability >= rule.capability
        if fits and rule.accepts(dict(facts)):
            return rule
    return Rule("reference", "no kernel takes this shape, dtype or option on this device")


def implementation(op: str, device: torch.device, **facts) -> str:
    """The name of the implementation ("reference", "triton" or "gluon") of `op` on `device`, from host-known facts."""
    return choose(op, device, **facts).implementation
