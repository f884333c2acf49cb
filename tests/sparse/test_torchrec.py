"""The same training with TorchRec (fused row-wise Adagrad) on several processes; skipped where it is missing.

Install beside the CPU build of torch 2.13: `fbgemm-gpu-cpu==1.8.0` and, without its dependencies, `torchrec==1.8.0`.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests.sparse import workers

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed"),
]
STEPS, LR = 20, 0.05
KEYS = {"views.item": "items", "views.shop": "shop", "item": "items", "hour": "hour", "tags": "tags"}


def torchrec_collection(world: int, start: dict, placement: str):
    """A sharded TorchRec EmbeddingCollection with the rows of `start`; "table": table i on rank i % world."""
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    set_gradient_division(False)
    tables = [
        EmbeddingConfig(
            name=f"table_{name}", embedding_dim=workers.DIM, num_embeddings=rows,
            feature_names=[key for key, table in KEYS.items() if table == name],
        )
        for name, rows in workers.ROWS.items()
    ]  # fmt: skip
    module = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": LR, "eps": 1e-8})
    sharder = EmbeddingCollectionSharder()
    kinds = {"table": lambda i: table_wise(rank=i % world), "row": lambda i: row_wise()}
    kinds["column"] = lambda i: column_wise(ranks=list(range(world)))
    placed = {f"table_{name}": kinds[placement](i) for i, name in enumerate(workers.ROWS)}
    made = construct_module_sharding_plan(
        module, placed, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=ShardingPlan({"": made}), sharders=[sharder],
    )  # fmt: skip
    for table, shard in local_shards(model):
        shard.tensor.detach().copy_(part_of(start[table], shard))
    return model


def part_of(whole: torch.Tensor, shard) -> torch.Tensor:
    (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
    return whole[row : row + rows, column : column + columns]


def local_shards(model):
    for name, tensor in model.state_dict().items():
        for shard in tensor.local_shards():
            yield name.split(".")[-2].removeprefix("table_"), shard


def keyed(batch):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    one = torch.ones(batch.batch_size, dtype=torch.int64)
    inputs = {key: batch.sequences.get(key, batch.features.get(key)) for key in KEYS}
    values = [x.values if hasattr(x, "values") and hasattr(x, "offsets") else x for x in inputs.values()]
    lengths = [x.lengths if hasattr(x, "offsets") else one for x in inputs.values()]
    return KeyedJaggedTensor(keys=list(KEYS), values=torch.cat(values), lengths=torch.cat(lengths))


class Looked:
    """TorchRec's vectors in the shape of `Embedded`."""

    def __init__(self, batch, found) -> None:
        self.sequences = {k: batch.sequences[k].with_values(found[k].values()) for k in ("views.item", "views.shop")}
        lists = batch.features["tags"]
        zero = torch.zeros(batch.batch_size, workers.DIM)
        pooled = zero.index_add(0, lists.row_to_sample, found["tags"].values())
        self.features = {"item": found["item"].values(), "hour": found["hour"].values(), "tags": pooled}


def compare(rank: int, world: int, placement: str) -> float:
    """Largest difference of any row after STEPS steps."""
    ours = workers.make(1, placement=dict.fromkeys(workers.ROWS, placement))
    if placement == "column":  # TorchRec steps each part of a row by the mean over that part: the only difference
        alone = [dist.new_group([r]) for r in range(world)][rank]
        parts = ours.storage.columns
        ours.storage.columns = dataclasses.replace(parts, dim=parts.dim // world, group=alone)
    theirs = torchrec_collection(world, ours.gather()["weight"], placement)
    for step in range(STEPS):
        batch = workers.part(workers.random_batch(step), rank, world, step=0)  # TorchRec takes no rank without samples
        workers.loss_of(batch, ours(batch)).backward()
        ours.step(LR)
        workers.loss_of(batch, Looked(batch, theirs(keyed(batch)))).backward()
    final = ours.gather()["weight"]
    worst = 0.0
    for table, shard in local_shards(theirs):
        worst = max([worst, *(part_of(final[table], shard) - shard.tensor).abs().flatten().tolist()])
    return worst


@pytest.mark.parametrize("placement, world", [("table", 2), ("row", 2), ("row", 4), ("column", 2)])
def test_tables_are_torchrecs_after_20_steps(placement, world):
    assert max(workers.spawn(compare, world, placement)) < 1e-5
