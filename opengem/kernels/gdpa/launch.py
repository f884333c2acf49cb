"""Host side of the fast kernels: tile sizes, grids, buffers, descriptors. No value is read from the device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from opengem.kernels.gdpa import gluon_sm90, gluon_sm90_backward
from opengem.kernels.gdpa import triton as kernels
from opengem.kernels.jfa.gluon_sm90 import plain, ragged
from opengem.kernels.launch import aligned, launch, multiprocessors

NARROW = 64  # most queries a sample may have for the narrow kernels
CHUNK = 2048  # keys one narrow program walks over; fixed, so that a sample's sums never depend on the batch
Q_TILE = 128  # query rows of wide_fwd and wide_dq
DEALT = (8, 2048)  # samples that a program of deal_tiles lists, and compares them with at a time

# padded head dimension -> (BM, BN, warps, stages)
FWD = {32: (128, 128, 8, 3), 64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)}
DQ = {32: (128, 64, 8, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)}
DKDV = {32: (64, 128, 8, 3), 64: (64, 128, 8, 3), 128: (64, 128, 8, 2), 256: (32, 64, 8, 2)}
# padded head dimension -> (BN, warps, stages); BM is 16, 32 or 64 by the longest query
NARROW_FWD = {32: (128, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 8, 2)}
NARROW_BWD = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 2), 256: (64, 8, 2)}
HEAD_DIMS = (32, 64, 96, 128, 256)

GLUON_HEAD_DIMS = (64, 128)
FOLDED = ("gelu_tanh", "silu")  # the factor of the scores moves to the sums; in fp16 it guards their range
GLUON_DQ = (128, 2)  # key rows of a tile, stages
GLUON_DKDV = (64, 3)  # query rows of a tile, stages
RESIDENT_KEYS = 256  # as many stay in shared memory for a whole sample
# Forward: key rows of a tile, stages, whether the warpgroups take turns at the matrix unit
STREAM = (128, 2, True)
RESIDENT, RESIDENT_SHORT = (128, 2, False), (64, 4, False)  # the latter where queries are at most RESIDENT_KEYS too
OWNER_KEYS = 256  # most keys a sample may have for the backward in which a block owns a sample and head
OWNED_KEYS = 128  # key rows at a time of the backward in one kernel (`gluon_sm90_backward.py`)
BACKWARD_STAGES = (3, 2)  # tiles of queries, of output gradients


class Plan(NamedTuple):
    """What follows from shapes alone."""

    batch: int
    heads: int
    dim: int
    padded: int
    seeds: int
    narrow: bool
    block_q: int
    kv_tile: int
    rows: int  # of the output
    q_bound: int
    kv_bound: int
    runs: bool


def deal(q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, size: int, max_q: int, shared_q: bool) -> Tensor:
    """int32 `[size]`: which tiles exist, longest work first. One small kernel."""
    plan = _plan(q, k, kv_offsets, max_q, 0, shared_q)
    schedule = torch.empty(size, dtype=torch.int32, device=q.device)
    if plan.batch:
        launch(
            kernels.deal_tiles, (-(-plan.batch // DEALT[0]), 3, 1), _key(plan, (), q_offsets, kv_offsets),
            (q_offsets, kv_offsets, schedule, plan.batch, plan.q_bound, plan.kv_bound),
            (Q_TILE, plan.kv_tile, plan.seeds, plan.narrow, *DEALT), warps=8)
    return schedule


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, schedule: Tensor, max_q: int, max_kv: int,
    activation: str, scale: float, shared_q: bool, gluon: bool = False,
) -> Tensor:
    """As `reference.forward`. `gluon`: the Hopper kernel where it fits (wide, own queries, D 64 or 128)."""
    plan = _plan(q, k, kv_offsets, max_q, max_kv, shared_q)
    if not plan.batch or not max_kv or not max_q:
        return q.new_zeros(plan.rows, *q.shape[1:])
    if gluon and _gluon_fits(q, k, plan):
        return _gluon_forward(q, k, v, q_offsets, schedule, plan, max_q, max_kv, activation, scale)
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    act = activation, q.is_cuda
    key = _key(plan, strides, q_offsets, kv_offsets, schedule, q, k, v)
    if plan.narrow:
        return _narrow_forward(q, k, v, q_offsets, kv_offsets, schedule, plan, scale, strides, act, key)
    out = q.new_empty(plan.rows, *q.shape[1:])
    bm, bn, warps, stages = FWD[plan.padded]
    launch(
        kernels.wide_fwd, (plan.q_bound * plan.heads, 1, 1), key,
        (q, k, v, out, q_offsets, kv_offsets, schedule, plan.batch, plan.rows, scale, plan.heads, *strides),
        (*act, bm, bn, plan.dim, plan.padded, plan.seeds), warps, stages)
    return out


def _narrow_forward(q, k, v, q_offsets, kv_offsets, schedule, plan, scale, strides, act, key) -> Tensor:
    # Seeds own every output row; jagged queries may leave rows to nobody, and these kernels do not visit them.
    shape = plan.rows, *q.shape[1:]
    out = q.new_empty(shape) if plan.seeds else q.new_zeros(shape)
    partial = _partial(q, plan, plan.runs)
    bn, warps, stages = NARROW_FWD[plan.padded]
    launch(
        kernels.narrow_fwd, (plan.kv_bound * plan.heads, 1, 1), key,
        (q, k, v, out, partial, q_offsets, kv_offsets, schedule, plan.q_bound, scale, plan.heads, *strides),
        (*act, plan.block_q, bn, plan.dim, plan.padded, plan.seeds, CHUNK, plan.runs), warps, stages)
    if plan.runs:
        _sum_runs(partial, out, q_offsets, kv_offsets, plan)
    return out


def _gluon_forward(q, k, v, q_offsets, schedule, plan, max_q, max_kv, activation, scale) -> Tensor:
    q, k, v = (_tma_ready(x) for x in (q, k, v))
    out = q.new_empty(q.shape)
    resident = max_kv <= RESIDENT_KEYS
    blocks = min(multiprocessors(q.device), (plan.batch if resident else plan.q_bound) * plan.heads)
    head_strides = q.stride(1), k.stride(1), v.stride(1)
    start = 4 + 4 * (plan.q_bound + plan.kv_bound) if resident else 4
    fold = activation in FOLDED and q.dtype == torch.bfloat16
    rows, stages, turns = STREAM if not resident else RESIDENT if max_q > RESIDENT_KEYS else RESIDENT_SHORT
    launch(
        gluon_sm90.forward, (blocks, 1, 1), _key(plan, (out.numel() >> 31, *head_strides), q_offsets, schedule, q),
        (ragged(q, 64), ragged(k, rows), ragged(v, rows), ragged(out, 64), out, q_offsets, schedule, plan.batch,
         start, out.numel(), scale, plan.heads, *head_strides),
        (activation, plan.dim, rows, stages, resident, fold, turns))
    return out


def _gluon_backward(grad, q, k, v, q_offsets, kv_offsets, schedule, plan, activation, scale):
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    sides = (
        (k, v, q, grad, dk, dv, kv_offsets, plan.kv_bound, 4 + 4 * plan.q_bound, GLUON_DKDV, True),
        (q, grad, k, v, dq, dq, q_offsets, plan.q_bound, 4, GLUON_DQ, False),
    )
    for a1, a2, b1, b2, o1, o2, offsets, bound, list_start, (rows, stages), keys in sides:
        blocks = min(multiprocessors(q.device), bound * plan.heads)
        head_strides = a1.stride(1), a2.stride(1), b1.stride(1), b2.stride(1)
        launch(
            gluon_sm90.backward, (blocks, 1, 1), _key(plan, (o1.numel() >> 31, *head_strides), offsets, schedule, q),
            (ragged(a1, 64), ragged(a2, 64), ragged(b1, rows), ragged(b2, rows), ragged(o1, 64), ragged(o2, 64), o1, o2,
             offsets, schedule, plan.batch, list_start, o1.numel(), scale, plan.heads, *head_strides),
            (activation, plan.dim, rows, stages, keys))
    return dq, dk, dv


def _backward_in_one(grad, q, k, v, q_offsets, kv_offsets, schedule, plan, max_q, max_kv, activation, scale):
    """Five products in one kernel: a block owns a sample and head where keys are few, else blocks take turns at dq."""
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    owner = max_kv <= OWNER_KEYS
    places = 4 + 4 * (plan.q_bound + plan.kv_bound + plan.batch)
    if owner:
        blocks, list_start = min(multiprocessors(q.device), plan.batch * plan.heads), places - 4 * plan.batch
        q_slots = -(-max_q // 64)
        slots, counters = blocks * q_slots if max_kv > OWNED_KEYS else 1, schedule  # nobody counts
    else:
        blocks, list_start = min(multiprocessors(q.device), plan.kv_bound * plan.heads), 4 + 4 * plan.q_bound
        q_slots = q.shape[0] // 64 + plan.batch + 1
        slots = plan.heads * q_slots
        counters = torch.zeros(slots + 1, dtype=torch.int32, device=q.device)
    scratch = torch.empty(slots * 64, plan.dim, dtype=torch.float32, device=q.device)
    head_strides = q.stride(1), grad.stride(1), k.stride(1), v.stride(1)
    fold = activation in FOLDED and q.dtype == torch.bfloat16
    launch(
        gluon_sm90_backward.backward, (blocks, 1, 1),
        _key(plan, (dq.numel() >> 31, dk.numel() >> 31, *head_strides), q_offsets, kv_offsets, schedule, q),
        (*(ragged(x, 64) for x in (q, grad, k, v)), plain(scratch, 64), dq, dk, dv, scratch,
         counters, q_offsets, kv_offsets, schedule, plan.batch, list_start, places, dq.numel(), dk.numel(), q_slots,
         multiprocessors(q.device) // 2, scale, plan.heads, *head_strides),
        (activation, plan.dim, *BACKWARD_STAGES, 2 if owner else 1, fold, owner, owner and max_q <= OWNER_KEYS))
    return dq, dk, dv


def _gluon_fits(q: Tensor, k: Tensor, plan: Plan) -> bool:
    """Wide, own queries, D 64 or 128, and some rows (a descriptor cannot be empty)."""
    return not plan.narrow and not plan.seeds and plan.dim in GLUON_HEAD_DIMS and q.shape[0] > 0 and k.shape[0] > 0


def _tma_ready(x: Tensor) -> Tensor:
    """TMA wants 16-byte aligned rows; anything else is copied."""
    row, head, element = x.stride()
    fits = element == 1 and row % 8 == 0 and 0 < row < 1 << 33 and head > 0 and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, schedule: Tensor,
    max_q: int, max_kv: int, activation: str, scale: float, shared_q: bool, gluon: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.backward`; `gluon` as in `forward`."""
    plan = _plan(q, k, kv_offsets, max_q, max_kv, shared_q)
    if not plan.batch or not max_kv or not max_q:
        return tuple(x.new_zeros(x.shape) for x in (q, k, v))
    if gluon and _gluon_fits(q, k, plan):
        tensors = (*(_tma_ready(x) for x in (grad, q, k, v)), q_offsets, kv_offsets, schedule)
        if plan.dim == 128 and (max_kv <= OWNER_KEYS or max_kv <= 2 * max_q):
            return _backward_in_one(*tensors, plan, max_q, max_kv, activation, scale)
        return _gluon_backward(*tensors, plan, activation, scale)
    grad, q, k, v = (_rows_contiguous(x) for x in (grad, q, k, v))
    strides = (*grad.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    key = _key(plan, strides, q_offsets, kv_offsets, schedule, q, k, v, grad)
    side = _narrow_backward if plan.narrow else _wide_backward
    act = activation, q.is_cuda
    return side(grad, q, k, v, q_offsets, kv_offsets, schedule, plan, scale, strides, act, key)


def _wide_backward(grad, q, k, v, q_offsets, kv_offsets, schedule, plan, scale, strides, act, key):
    dq = q.new_empty(plan.rows, *q.shape[1:], dtype=torch.float32 if plan.seeds else q.dtype)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    bm, bn, warps, stages = DKDV[plan.padded]
    launch(
        kernels.wide_dkdv, (plan.kv_bound * plan.heads, 1, 1), key,
        (grad, q, k, v, dk, dv, q_offsets, kv_offsets, schedule, plan.batch, plan.q_bound, k.shape[0], scale,
         plan.heads, *strides), (*act, bm, bn, plan.dim, plan.padded, plan.seeds), warps, stages)
    bm, bn, warps, stages = DQ[plan.padded]
    launch(
        kernels.wide_dq, (plan.q_bound * plan.heads, 1, 1), key,
        (grad, q, k, v, dq, q_offsets, kv_offsets, schedule, plan.batch, plan.rows, scale, plan.heads, *strides),
        (*act, bm, bn, plan.dim, plan.padded, plan.seeds), warps, stages)
    if plan.seeds:
        dq = dq.view(plan.batch, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv


def _narrow_backward(grad, q, k, v, q_offsets, kv_offsets, schedule, plan, scale, strides, act, key):
    dq = q.new_zeros(q.shape)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    partial = _partial(q, plan, plan.runs or plan.seeds > 0)
    bn, warps, stages = NARROW_BWD[plan.padded]
    launch(
        kernels.narrow_bwd, (plan.kv_bound * plan.heads, 1, 1), key,
        (grad, q, k, v, dq, dk, dv, partial, q_offsets, kv_offsets, schedule, plan.batch, plan.q_bound, k.shape[0],
         scale, plan.heads, *strides),
        (*act, plan.block_q, bn, plan.dim, plan.padded, plan.seeds, CHUNK, plan.runs), warps, stages)
    if plan.seeds:
        dq = partial.sum(0)[:, : plan.seeds].transpose(0, 1).to(q.dtype).contiguous()
    elif plan.runs:
        _sum_runs(partial, dq, q_offsets, kv_offsets, plan)
    return dq, dk, dv


def _partial(q: Tensor, plan: Plan, needed: bool) -> Tensor:
    """Shares of runs, fp32 [slots, H, BM, D]; zeroed where slots nobody writes would be added up."""
    slots = (plan.kv_bound if plan.runs else plan.batch) if needed else 0
    shape = (slots, plan.heads, plan.block_q, plan.dim)
    allocate = torch.zeros if plan.runs and plan.seeds else torch.empty
    return allocate(shape, dtype=torch.float32, device=q.device)


def _sum_runs(partial, out, q_offsets, kv_offsets, plan):
    launch(
        kernels.sum_runs, (plan.batch * plan.heads, 1, 1), None, (partial, out, q_offsets, kv_offsets, plan.heads),
        (plan.block_q, plan.dim, plan.padded, plan.seeds, CHUNK))


def _key(plan: Plan, strides: tuple, q_offsets: Tensor, *rest: Tensor) -> tuple | None:
    """For `launch`: what Triton specialises on besides constants. The last tensor has the dtype of all values."""
    if not aligned(q_offsets, *rest):
        return None
    return q_offsets.device, q_offsets.dtype, rest[0].dtype, rest[-1].dtype, plan.heads, plan.dim, strides


def _plan(q: Tensor, k: Tensor, kv_offsets: Tensor, max_q: int, max_kv: int, shared_q: bool) -> Plan:
    return _planned(tuple(q.shape), k.shape[0], kv_offsets.shape[0] - 1, max_q, max_kv > CHUNK, shared_q)


@lru_cache
def _planned(q_shape: tuple, keys: int, batch: int, max_q: int, runs: bool, shared_q: bool) -> Plan:
    dim = q_shape[2]
    padded, narrow = 128 if dim == 96 else dim, max_q <= NARROW
    kv_tile = CHUNK if narrow else DKDV[padded][1]
    rows = batch * q_shape[0] if shared_q else q_shape[0]
    return Plan(
        batch=batch, heads=q_shape[1], dim=dim, padded=padded, seeds=q_shape[0] if shared_q else 0, narrow=narrow,
        block_q=16 if max_q <= 16 else 32 if max_q <= 32 else 64, kv_tile=kv_tile, rows=rows,
        q_bound=-(-rows // Q_TILE) + batch, kv_bound=-(-keys // kv_tile) + batch, runs=runs,
    )


def _rows_contiguous(x: Tensor) -> Tensor:
    """Any row and head stride will do as long as a tile's offsets fit 32 bits; the last stride must be 1."""
    return x if x.stride(2) == 1 and max(x.stride()[:2]) < 1 << 23 else x.contiguous()
