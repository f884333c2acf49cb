"""`opengem bench sparse`: table-batched lookup and fused update on the feature mix published for GEM.

562 features with a table each: 256 pooled by sum, 51 by weighted sum, 255 sequences. Widths cycle 64, 128, 256; rows
cycle 1e5, 1e6 times the scale in the case's name (rows.5 is 92 GB in float32). 1,152 samples, about 20 ids each
(log-normal, at most 200), Zipf(1.05) over rows scattered in the table; eight batches in turn. The update is exact
row-wise Adagrad, stochastically rounded for 16-bit rows. Sorting the ids is part of the update; a second row counts it
as done ahead, as the input pipeline can.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.run import ceilings, environment, record
from opengem.errors import UserError
from opengem.sparse import noise
from opengem.sparse.lookup import cost, op
from opengem.sparse.lookup.optimiser import Optimiser

DIMS, ROWS, KINDS = (64, 128, 256), (100_000, 1_000_000), {"sum": 256, "weighted": 51, "none": 255}
SAMPLES, MEAN_LENGTH, SIGMA, LONGEST, ZIPF, BATCHES, RUNS = 1152, 20.0, 0.7, 200, 1.05, 8, 16
CASES = {
    "gem_fp32_rows.5": (torch.float32, 0.5),
    "gem_fp16_rows.5": (torch.float16, 0.5),
    "gem_fp32_rows.02": (torch.float32, 0.02),
}
LR, OPTIMISER = 0.01, Optimiser("adagrad")


@dataclass
class Group:
    """The features of one kind and width: one matrix of rows, and for each batch (ids, offsets, sample weights)."""

    kind: str
    weight: Tensor
    first_rows: Tensor
    batches: list[tuple[Tensor, Tensor, Tensor | None]]
    state: dict[str, Tensor]
    rounding: noise.Rounding
    grads: Tensor

    @property
    def pooling(self) -> str:
        return "none" if self.kind == "none" else "sum"

    def arguments(self, batch: int) -> op.Lookup:
        ids, offsets, weights = self.batches[batch]
        return op.Lookup(self.weight, ids, offsets, self.first_rows, self.pooling, weights)

    def lookup(self, batch: int) -> Tensor:
        x = self.arguments(batch)
        return op.lookup(x.weight, x.ids, x.offsets, x.first_rows, pooling=x.pooling, sample_weights=x.sample_weights,
                         dtype=x.weight.dtype)

    def update(self, order: op.Order, batch: int, step: int) -> None:
        grads = self.grads[: self.outputs(batch)]
        op.update(self.weight, self.state, order, grads, OPTIMISER, lr=LR, step=step, rounding=self.rounding)

    def outputs(self, batch: int) -> int:
        ids, offsets, _ = self.batches[batch]
        return ids.shape[0] if self.kind == "none" else offsets.shape[0] - 1


def make(dtype: torch.dtype, scale: float, device: torch.device, batches: int = BATCHES, seed: int = 0) -> list[Group]:
    """All groups of the mix, made on the device."""
    g = torch.Generator(device).manual_seed(seed)
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    rows = [int(ROWS[i % len(ROWS)] * scale) for i in range(len(kinds))]
    zipf = {n: _zipf(n, device) for n in set(rows)}
    groups = []
    for kind in KINDS:
        for width in range(len(DIMS)):
            members = [i for i, k in enumerate(kinds) if k == kind and i % len(DIMS) == width]
            groups.append(_group(kind, DIMS[width], [rows[i] for i in members], zipf, dtype, batches, g))
    return groups


def _group(kind: str, dim: int, rows: list[int], zipf: dict, dtype: torch.dtype, batches: int, g) -> Group:
    device = g.device
    first = torch.tensor([0, *rows[:-1]], device=device).cumsum(0)
    weight = torch.empty(sum(rows), dim, dtype=dtype, device=device)
    for part in weight.split(1 << 20):
        part.normal_(0, 0.05, generator=g)
    made = [_batch(rows, zipf, g, kind == "weighted") for _ in range(batches)]
    longest = max(ids.shape[0] if kind == "none" else offsets.shape[0] - 1 for ids, offsets, _ in made)
    grads = torch.randn(longest, dim, generator=g, device=device).to(dtype)
    rounding = noise.Rounding.of([(0, 0)], device)
    return Group(kind, weight, first, made, OPTIMISER.state(sum(rows), dim, device), rounding, grads)


def _zipf(rows: int, device: torch.device) -> Tensor:
    return (1 / torch.arange(1, rows + 1, device=device, dtype=torch.float64) ** ZIPF).cumsum(0)


def _batch(rows: list[int], zipf: dict[int, Tensor], g, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    device, mean = g.device, math.log(MEAN_LENGTH) - SIGMA**2 / 2
    lengths = torch.empty(len(rows) * SAMPLES, device=device).log_normal_(mean, SIGMA, generator=g)
    lengths = lengths.round().clamp(0, LONGEST).long()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = []
    for n, count in zip(rows, lengths.view(len(rows), SAMPLES).sum(1).tolist(), strict=True):
        draw = torch.rand(count, generator=g, device=device, dtype=torch.float64) * zipf[n][-1]
        rank = torch.searchsorted(zipf[n], draw).clamp(max=n - 1)
        ids.append(rank * 7919 % n)  # 7,919 is prime to every number of rows here: a permutation
    ids = torch.cat(ids)
    return ids, offsets, torch.rand(ids.shape[0], generator=g, device=device) if weighted else None


def sort(groups: list[Group], batch: int) -> list[op.Order]:
    return op.sort_all([group.arguments(batch) for group in groups])


def least_bytes(groups: list[Group]) -> tuple[int, int]:
    """(forward, update) bytes of an average batch, each distinct row counted once."""
    forward = update = 0
    for group in groups:
        for batch, (ids, offsets, weights) in enumerate(group.batches):
            rows = op.reference.number_rows(ids, offsets, group.first_rows)[0]
            counts = (ids.shape[0], rows.unique().shape[0], offsets.shape[0], group.outputs(batch))
            facts = (*counts, group.weight.shape[1], group.weight.itemsize, weights is not None)
            forward += cost.forward_bytes(*facts)
            update += cost.update_bytes(*facts)
    count = len(groups[0].batches)
    return forward // count, update // count


def timed(step: Callable[[int], object], runs: int = RUNS) -> tuple[float, float]:
    """(median milliseconds, quartile distance over median) of `step(i)`; the inputs are far larger than the L2."""
    for i in range(4):
        step(i)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for i, (first, last) in enumerate(marks):
        first.record()
        step(i)
        last.record()
    torch.cuda.synchronize()
    low, middle, high = statistics.quantiles([first.elapsed_time(last) for first, last in marks], n=4)
    return middle, (high - low) / middle


def measure(groups: list[Group]) -> Iterator[dict]:
    """Our row with sorting inside the update, and the one with sorting ahead."""
    count = len(groups[0].batches)

    def forward(i: int) -> None:
        for group in groups:
            group.lookup(i % count)

    def backward(i: int) -> None:
        for group, order in zip(groups, sort(groups, i % count), strict=True):
            group.update(order, i % count, i + 1)

    fwd, fwd_spread = timed(forward)
    bwd, bwd_spread = timed(backward)
    times = {"fwd_ms": fwd, "spread": fwd_spread}
    yield {"impl": "opengem", **times, "bwd_ms": bwd, "bwd_spread": bwd_spread}
    orders = [sort(groups, batch) for batch in range(2)]

    def sorted_ahead(i: int) -> None:
        for group, order in zip(groups, orders[i % 2], strict=True):
            group.update(order, i % 2, i + 1)

    bwd, bwd_spread = timed(sorted_ahead)
    yield {"impl": "opengem, ids sorted ahead", **times, "bwd_ms": bwd, "bwd_spread": bwd_spread}


def torch_merged(groups: list[Group]) -> dict:
    """The peer in plain torch: tables merged by width, `embedding_bag` and `index_select`, a compiled Adagrad."""
    count = len(groups[0].batches)

    @torch.compile(dynamic=True)
    def adagrad(old: Tensor, moment: Tensor, grad: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        moment = moment + grad.square().mean(1)
        return (old.float() - lr * grad / (moment.sqrt() + 1e-8)[:, None]).to(old.dtype), moment

    def forward(i: int) -> None:
        for group in groups:
            ids, offsets, weights = group.batches[i % count]
            rows = op.reference.number_rows(ids, offsets, group.first_rows)[0]
            if group.kind == "none":
                group.weight.index_select(0, rows)
            else:
                factors = None if weights is None else weights.to(group.weight.dtype)
                F.embedding_bag(
                    rows, group.weight, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
                )

    def backward(i: int) -> None:
        for group in groups:
            ids, offsets, weights = group.batches[i % count]
            rows, bags = op.reference.number_rows(ids, offsets, group.first_rows)
            touched, inverse = rows.unique(return_inverse=True)
            grads = group.grads[: group.outputs(i % count)].float()
            grads = grads if group.kind == "none" else grads.index_select(0, bags)
            grads = grads if weights is None else grads * weights[:, None]
            summed = grads.new_zeros(touched.shape[0], grads.shape[1]).index_add_(0, inverse, grads)
            old, moment = group.weight[touched], group.state["moment"][touched]
            group.weight[touched], group.state["moment"][touched] = adagrad(old, moment, summed, LR)

    fwd, spread = timed(forward, 8)
    bwd, bwd_spread = timed(backward, 8)
    name = "torch, tables merged by dim, update compiled"
    return {"impl": name, "peer": name, "fwd_ms": fwd, "spread": spread, "bwd_ms": bwd, "bwd_spread": bwd_spread}


def fbgemm(groups: list[Group]) -> dict:
    """The peer FBGEMM; ImportError where it is not installed."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    modules, count = [], len(groups[0].batches)
    for group in groups:
        ends = [*group.first_rows.tolist(), group.weight.shape[0]]
        tables = [
            (last - first, group.weight.shape[1], EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
            for first, last in zip(ends, ends[1:], strict=False)
        ]
        kind = SparseType.FP32 if group.weight.dtype == torch.float32 else SparseType.FP16
        group.weight = torch.empty(0, group.weight.shape[1], dtype=group.weight.dtype)  # both would not fit
        modules.append(
            SplitTableBatchedEmbeddingBagsCodegen(
                tables,
                weights_precision=kind,
                output_dtype=kind,
                optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                learning_rate=LR,
                stochastic_rounding=kind == SparseType.FP16,
                pooling_mode=PoolingMode.NONE if group.kind == "none" else PoolingMode.SUM,
            )
        )

    def forward(i: int) -> list[Tensor]:
        return [m(*g.batches[i % count]) for m, g in zip(modules, groups, strict=True)]

    fwd, spread = timed(forward, 8)
    outputs = [forward(i) for i in range(2)]
    grads = [[torch.randn_like(out) for out in outs] for outs in outputs]
    bwd, bwd_spread = timed(lambda i: torch.autograd.backward(outputs[i % 2], grads[i % 2], retain_graph=True), 8)
    return {"impl": "FBGEMM TBE", "peer": "FBGEMM TBE", "fwd_ms": fwd, "spread": spread, "bwd_ms": bwd,
            "bwd_spread": bwd_spread}  # fmt: skip


def run(out: Path | None, peers: bool, only: tuple[str, ...] = ("gem_fp32_rows.5", "gem_fp16_rows.5")) -> list[dict]:
    """Time the cases in `only`; append JSON lines to `out`; return the rows."""
    if not torch.cuda.is_available():
        raise UserError("bench sparse needs a CUDA device and this machine has none")
    unknown = [name for name in only if name not in CASES]
    if unknown:
        raise UserError(f"bench sparse: no case {unknown[0]!r}; known: {', '.join(CASES)}")
    device = torch.device("cuda")
    facts = environment(device) | ceilings(device)
    rows = []
    for name in only:
        torch.cuda.empty_cache()
        groups = make(*CASES[name], device)
        fwd_bytes, bwd_bytes = least_bytes(groups)
        shape = {"features": sum(KINDS.values()), "samples": SAMPLES, "least_fwd_bytes": fwd_bytes,
                 "least_bwd_bytes": bwd_bytes}  # fmt: skip
        for row in _all(groups, peers):
            row = {"op": "sparse", "case": name, "peer": None, **row, "shape": shape}
            for part, moved in (("fwd", fwd_bytes), ("bwd", bwd_bytes)):
                row[f"{part}_tflops"], row[f"{part}_gbs"] = None, moved / row[f"{part}_ms"] / 1e6
            rows.append(row | facts)
            record(rows[-1], describe(rows[-1]), out)
        del groups
    return rows


def _all(groups: list[Group], peers: bool) -> Iterator[dict]:
    yield from measure(groups)
    if peers:
        yield torch_merged(groups)
        try:
            yield fbgemm(groups)
        except ImportError as error:
            print(f"FBGEMM is not installed ({error}); its row is left out")


def describe(row: dict) -> str:
    step = row["fwd_ms"] + row["bwd_ms"]
    bound = (row["shape"]["least_fwd_bytes"] + row["shape"]["least_bwd_bytes"]) / row["copy_gbs"] / 1e6
    return (
        f"{row['case']:<20}{row['impl']:<46}fwd {row['fwd_ms']:6.2f}  update {row['bwd_ms']:6.2f}  "
        f"step {step:6.2f} ms  {bound / step:.2f} of the unique-bytes bound"
    )
