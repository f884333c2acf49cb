"""Every generation over Gloo processes gives what one process gives, and reads what any other wrote."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from opengem import checkpoint
from opengem.errors import UserError
from opengem.mesh import ranks_per_node
from opengem.sparse.collection import EmbeddingCollection
from opengem.sparse.fully_sharded_2d import FullyShardedTables
from opengem.sparse.plan import plan
from opengem.sparse.sharded import _in_a_node
from opengem.sparse.sharded_2d import Copies
from opengem.sparse.table import Piece
from tests.sparse.workers import (
    DIM,
    FEATURES,
    ROWS,
    SCHEMA,
    SHORT,
    checkpoints,
    config,
    everything,
    meshes,
    one_process,
    spawn,
    too_few_columns,
    trajectories,
)

STEPS, KINDS = 50, ("weight", "moment")
pytestmark = pytest.mark.timeout(900)  # the first test waits for all groups of processes, on two slow cores as well


@pytest.fixture(scope="module")
def reference():
    """Number of steps -> (losses, tables) of one process that sees every sample."""
    return {steps: one_process(steps) for steps in (SHORT, STEPS)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World size -> what each rank found; each group of processes also reads what the groups before it saved."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {1: [everything(0, 1, STEPS, folder)]}
    for world in (4, 2):
        found[world] = spawn(everything, world, STEPS, folder)
    found[3] = [{"checkpoints": each} for each in spawn(checkpoints, 3, folder)]
    found["one again"] = [everything(0, 1, 1, folder)]
    yield found
    meshes.cache_clear()
    dist.destroy_process_group()


worlds = pytest.mark.parametrize("world", [1, 2, 4])
many = pytest.mark.parametrize("world", [2, 4])


@pytest.mark.multi
@worlds
def test_losses_and_tables_are_those_of_one_process(world, runs, reference):
    """Gradients are summed once over shards and copies; a rank without data, a hot id, a table of 6 rows on 4 ranks."""
    for found in runs[world]:
        for ours, tables, _ in found["trajectories"].values():
            losses, state = reference[len(ours)]
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-6, atol=1e-6)
            for kind in KINDS:
                for table in ROWS:
                    torch.testing.assert_close(tables[kind][table], state[kind][table], rtol=1e-5, atol=1e-6)


@pytest.mark.multi
@many
@pytest.mark.parametrize("generations", [("v2_2", "v3_2", "v3_2_chunks"), ("v2_2_columns", "v3_2_columns")])
def test_copied_and_fully_sharded_tables_agree_bit_for_bit(world, generations, runs):
    """Cut by columns as well: the parts of a row see the mean of the whole row's squared gradient."""
    found = runs[world][0]["trajectories"]
    for kind in KINDS:
        for table in ROWS:
            copied, *split = (found[name][1][kind][table] for name in generations)
            assert all(torch.equal(copied, other) for other in split)


@pytest.mark.multi
def test_columns_that_cannot_be_shared_evenly_are_refused():
    for told in spawn(too_few_columns, 3):
        assert told.startswith("plan: 8 columns (sparse.dim) cannot be shared evenly by 3 ranks; place the tables")


@pytest.mark.multi
@many
def test_fully_sharded_bytes_are_those_of_a_copy_over_the_copies(world, runs):
    for found in runs[world]:
        sizes = {name: size for name, (_, _, size) in found["trajectories"].items()}
        rows = sizes["v2_2"] // 36
        assert sizes["v3_2"] == -(-rows // 2) * 36  # within a row of half, optimiser state included


@pytest.mark.multi
@many
def test_a_fully_sharded_lookup_never_holds_more_than_its_chunks(world, runs):
    """Nor does reading ahead leave any of them behind for the dense work."""
    shard, chunk, most, left = runs[world][0]["peak"]
    assert left < 2048
    assert most <= chunk + chunk // 2 + 8192 < shard / 6  # Gloo's thread may keep a finished half chunk for a moment


@pytest.mark.multi
@many
def test_averaging_is_the_mean_of_copies_that_stepped_alone(world, runs):
    found = runs[world][0]["average"]
    for name in ("v2", "v3", "v3_chunks"):
        for kind in KINDS:
            for table, wanted in found["by hand"][kind].items():
                torch.testing.assert_close(found[name][kind][table], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.multi
@many
def test_copies_that_differ_in_one_bit_are_found(world, runs):
    for found in runs[world]:
        assert found["divergence"] == "replicas differ: 1 values of the tables, first in row 7"


@pytest.mark.multi
@worlds
def test_the_pipeline_changes_no_bit(world, runs):
    """Fully sharded tables are read before the update of the batch before, and its rows again: still no bit."""
    for found in runs[world]:
        assert found["pipeline"] and all(found["pipeline"].values()), found["pipeline"]


@pytest.mark.multi
@worlds
def test_a_batch_without_samples_changes_nothing_and_hangs_nobody(world, runs):
    assert all(found["empty"] for found in runs[world])


@pytest.mark.multi
@many
def test_ranks_that_run_out_at_different_times_are_told(world, runs):
    """No hang and no silent end: every rank raises, at the same step."""
    for rank, found in enumerate(runs[world]):
        state = "has no" if rank == 0 else "has"
        told = f"2: ranks ran out of batches at different times: rank {rank} {state} batch 2"
        assert found["uneven"].startswith(told)
    assert runs[1][0]["uneven"] == "2"


@pytest.mark.multi
def test_any_checkpoint_loads_into_any_generation_on_any_number_of_processes(runs):
    """Empty shards (a table of 6 rows on 4 ranks) included; training goes on as if nothing had happened."""
    wanted = one_process(2)[1]
    next_loss = one_process(3)[0][2]
    seen = 0
    for world, ranks in runs.items():
        for found in ranks:
            for name, (state, losses) in found["checkpoints"].items():
                seen += 1
                for kind in KINDS:
                    for table in ROWS:
                        ours, other = state[kind][table], wanted[kind][table]
                        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6, msg=name)
                assert losses[0] == pytest.approx(next_loss, rel=1e-6), (world, name)
    assert seen > 30


@pytest.mark.multi
def test_eight_processes(reference):
    names = ("v1", "v1_columns", "v2_2", "v3_2", "v3_2_copied")
    for name, (losses, tables, _) in spawn(trajectories, 8, STEPS, names)[0].items():
        assert losses == pytest.approx(reference[STEPS][0], rel=1e-6, abs=1e-6), name
        for table in ROWS:
            torch.testing.assert_close(tables["weight"][table], reference[STEPS][1]["weight"][table], rtol=0, atol=1e-6)


def test_a_checkpoint_that_lacks_a_table_or_has_another_shape_is_refused(tmp_path):
    ours = EmbeddingCollection(SCHEMA, FEATURES, config(), "cpu", seed=3)
    state = ours.state_dict()
    tables = {name: table for name, table in state["weight"].items() if name != "shop"}
    for changed, message in (
        ({**state, "weight": tables}, "Missing key in checkpoint state_dict: embeddings.weight.shop"),
        ({**state, "weight": {**tables, "shop": torch.zeros(7, DIM)}}, "Size mismatch between saved"),
    ):
        path = checkpoint.save(tmp_path, 1, {"embeddings": changed}, keep=1)
        with pytest.raises(UserError, match=message):
            checkpoint.load(path, {"embeddings": ours.state_dict()})


@pytest.mark.parametrize("chunk_rows", [100, 200, 60])
def test_the_first_rows_of_tables_are_spread_over_the_copies(chunk_rows):
    """Ids are often numbered by how common they are: one rank would answer for the hot rows of all tables."""
    pieces = [Piece(f"t{i}", 0, 200, 200 * i) for i in range(8)]
    kept = []
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        bytes_of_chunk = 2 * 4 * DIM * chunk_rows
        shape = (pieces, 1600, DIM, "cpu", Copies(group, group), "exact", "rows", bytes_of_chunk)
        kept.append(FullyShardedTables(*shape, eps=0).pieces)
    rows = sorted((p.table, row) for own in kept for p in own for row in range(p.first, p.first + p.rows))
    assert rows == sorted((f"t{i}", row) for i in range(8) for row in range(200))
    assert abs(sum(p.first == 0 for p in kept[0]) - 4) <= (1 if chunk_rows == 60 else 0)


# ---- plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_plan_covers_every_row_once(world):
    for placement in ({}, dict.fromkeys(ROWS, "row")):
        made = plan(ROWS, world, row_bytes=36, placement=placement)
        for table, rows in ROWS.items():
            runs = sorted((p.first, p.rows) for pieces in made.pieces for p in pieces if p.table == table)
            assert sum(n for _, n in runs) == rows
            assert all(a + n == b for (a, n), (b, _) in zip(runs, runs[1:], strict=False))
        for pieces in made.pieces:
            assert [p.at for p in pieces] == [sum(q.rows for q in pieces[:i]) for i in range(len(pieces))]


def test_a_plan_balances_and_prints_bytes_and_load():
    made = plan({"big": 1000, "a": 100, "b": 100, "c": 90}, 4, row_bytes=36, ranks_per_node=2)
    assert made.placement == {"big": "row", "a": "table", "b": "table", "c": "table"}
    assert [made.rows(rank) for rank in range(4)] == [350, 350, 340, 250]
    assert "350         12,600" in made.describe()


def test_a_table_of_a_nodes_size_stays_inside_one_node():
    made = plan({"mid": 600, "rest": 600}, 4, row_bytes=36, ranks_per_node=2)
    assert made.placement == {"mid": "node", "rest": "node"}
    assert [{p.table for p in pieces} for pieces in made.pieces] == [{"mid"}, {"mid"}, {"rest"}, {"rest"}]


def test_small_tables_are_copied_and_lie_in_no_piece():
    made = plan({"big": 1000, "tiny": 5}, 2, row_bytes=36, copy_rows=5)
    assert made.placement == {"big": "node", "tiny": "copy"}
    assert [made.rows(rank) for rank in range(2)] == [500, 500]
    assert made.bytes_everywhere == 5 * 36


def test_columns_are_shared_by_all_ranks_and_so_is_the_load():
    made = plan({"hot": 100, "rest": 10}, 4, row_bytes=36, load={"hot": 8.0, "rest": 1.0}, placement={"hot": "column"})
    assert made.bytes_everywhere == 100 * (8 + 4)  # a quarter of 32 bytes, and the state of the row
    assert sorted(made.load) == [2.0, 2.0, 2.0, 3.0]
    assert sum(len(pieces) for pieces in made.pieces) == 1


@pytest.mark.parametrize("here, ranks, copies, node", [(8, 16, 1, 8), (8, 8, 2, 4), (8, 2, 8, 1), (6, 4, 1, 0)])
def test_shards_of_a_node_are_known_from_the_launcher(here, ranks, copies, node, monkeypatch):
    """Copies are neighbours, so a node of 8 processes with 2 copies holds 4 ranks of each shard group."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert _in_a_node(ranks, copies, ranks_per_node()) == node


def test_a_plan_names_what_it_does_not_know():
    with pytest.raises(UserError, match="no table 'x'; tables are items"):
        plan({"items": 4}, 2, row_bytes=36, placement={"x": "row"})
    with pytest.raises(UserError, match="placement 'grid', wanted one of table, node, row, copy, column"):
        plan({"items": 4}, 2, row_bytes=36, placement={"items": "grid"})
    with pytest.raises(UserError, match="4 ranks are no multiple of 3"):
        plan({"items": 4}, 4, row_bytes=36, ranks_per_node=3)
