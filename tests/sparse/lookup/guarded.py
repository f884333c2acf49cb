"""Runs the lookup kernels in Triton's interpreter on tensors with an unreadable page at their first and last byte.

    TRITON_INTERPRET=1 python -X faulthandler -m tests.sparse.lookup.guarded

An address out of a tensor by any amount within a page kills the process; the trace names the kernel. (What the
interpreter hides, `and` that evaluates both sides, test_triton.py looks for.)
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch.overrides import TorchFunctionMode

from opengem.kernels import backend
from opengem.sparse.lookup import op
from opengem.sparse.lookup.optimiser import Optimiser

PAGE = mmap.PAGESIZE
MADE = {"empty", "empty_like", "new_empty", "sort", "cumsum", "index_select"}  # what reaches a kernel
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
kept = []


def guarded(x: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy of `x` that begins right behind an unreadable page, or ends right before one."""
    if x.numel() == 0:
        return x
    size = -(-x.nbytes // PAGE) * PAGE
    region = mmap.mmap(-1, size + 2 * PAGE)
    kept.append(region)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (base, base + PAGE + size):
        assert libc.mprotect(page, PAGE, 0) == 0
    offset = PAGE + (size - x.nbytes if at_end else 0)
    out = torch.frombuffer(region, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
    return out.copy_(x)


class Guards(TorchFunctionMode):
    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") not in MADE:
            return out
        if isinstance(out, torch.Tensor):
            return guarded(out, self.at_end)
        return tuple(guarded(x, self.at_end) for x in out)


def mixes():
    """(name, row numbers): segments that begin, end or stay at every kind of edge of a block of 128."""
    g = torch.Generator().manual_seed(0)
    for count in (1, 128, 129, 384):
        yield f"distinct {count}", torch.randperm(count, generator=g)
        yield f"first row {count}", torch.zeros(count, dtype=torch.int64)
        yield f"last row {count}", torch.full((count,), count)
        yield f"random {count}", torch.randint(0, max(count // 6, 1), (count,), generator=g)
    yield "long first row", torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([2500, 1, 60]))
    yield "ends at blocks", torch.arange(4).repeat_interleave(torch.tensor([128, 128, 124, 4]))
    yield "power law", (torch.rand(1500, generator=g) ** 4 * 300).long()


def run(at_end: bool, kind: str, dtype: torch.dtype) -> None:
    for name, rows in mixes():
        print(kind, dtype, at_end, name, flush=True)
        count, dim = int(rows.max()) + 1, 4
        weight, grads = torch.randn(count, dim).to(dtype), torch.randn(len(rows), dim)
        state = Optimiser(kind).state(count, dim, "cpu")
        with backend.force("triton"), Guards(at_end):
            weight, grads, rows = (guarded(x, at_end) for x in (weight, grads, rows))
            state = {key: guarded(x, at_end) for key, x in state.items()}
            op.update(weight, state, op.sort_rows(weight, rows), grads, Optimiser(kind), lr=0.1, step=1)


def run_bags(at_end: bool, pooling: str, weighted: bool) -> None:
    """Two features of four bags, from the ids to the update."""
    lengths = torch.tensor([3, 0, 140, 1, 70, 0, 0, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, first = torch.cat([torch.zeros(144), torch.arange(72)]).long(), torch.tensor([0, 1])
    weights = torch.rand(len(ids)) if weighted else None
    weight = torch.randn(73, 4)
    state = Optimiser().state(73, 4, "cpu")
    with backend.force("triton"), Guards(at_end):
        given = [guarded(x, at_end) for x in (weight, ids, offsets, first)]
        weights = None if weights is None else guarded(weights, at_end)
        state = {key: guarded(x, at_end) for key, x in state.items()}
        grads = guarded(op.lookup(*given, pooling=pooling, sample_weights=weights), at_end)
        order = op.sort_ids(*given, pooling=pooling, sample_weights=weights)
        op.update(given[0], state, order, grads, Optimiser(), lr=0.1, step=1)


if __name__ == "__main__":
    for end in (False, True):
        run_bags(end, "sum", True)
        run_bags(end, "mean", False)
        run_bags(end, "none", False)
        run(end, "adagrad", torch.float32)
    run(False, "adam", torch.float16)
    print("done")
