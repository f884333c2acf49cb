"""Every generation over Gloo processes gives what one process gives."""

from __future__ import annotations

import pytest
import torch

from tests.sparse.workers import ROWS, generations, one_process, spawn, trajectories

pytestmark = pytest.mark.multi
STEPS = 50


@pytest.fixture(scope="module")
def reference():
    return one_process(STEPS)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_losses_and_tables_are_those_of_one_process(world, reference):
    """Gradients are summed once over shards and copies; a rank without data, a hot id, a table of 6 rows on 4 ranks."""
    losses, state = reference
    found = spawn(trajectories, world, STEPS)
    for name in generations(world):
        for rank in range(world):
            ours, tables, _ = found[rank][name]
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-6, atol=1e-6)
            for kind in ("weight", "moment"):
                for table in ROWS:
                    torch.testing.assert_close(tables[kind][table], state[kind][table], rtol=1e-5, atol=1e-6)
        assert all(torch.equal(found[0][name][1]["weight"][t], found[-1][name][1]["weight"][t]) for t in ROWS)
    if world > 1:
        for kind in ("weight", "moment"):
            for table in ROWS:
                tables = [found[0][name][1][kind][table] for name in ("v2_2", "v3_2", "v3_2_chunks")]
                assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])


def test_eight_processes(reference):
    found = spawn(trajectories, 8, 5)
    for name in generations(8):
        torch.testing.assert_close(
            torch.tensor(found[0][name][0]), torch.tensor(reference[0][:5]), rtol=1e-6, atol=1e-6
        )
