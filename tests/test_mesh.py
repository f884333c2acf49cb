"""Mesh rules, and the end of a job when one of its ranks fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from opengem.errors import UserError
from opengem.mesh import MeshSpec


@pytest.mark.parametrize(
    "spec, world, wanted",
    [
        (MeshSpec(), 1, MeshSpec(1, 1, 1, 1, 1)),
        (MeshSpec(), 8, MeshSpec(8, 1, 1, 1, 8)),
        (MeshSpec(replica=1, shard=0), 8, MeshSpec(1, 8, 1, 1, 8)),
        (MeshSpec(replica=2, shard=0, expert=4, sparse_replica=8), 8, MeshSpec(2, 4, 4, 8, 1)),
        (MeshSpec(4, 2, 2, 2, 4), 8, MeshSpec(4, 2, 2, 2, 4)),
    ],
)
def test_degrees_left_open_take_the_rest(spec, world, wanted):
    assert spec.resolve(world) == wanted


@pytest.mark.parametrize(
    "spec, message",
    [
        (MeshSpec(2, 3), "replica 2 x shard 3 = 6 ranks, but the job has 8; legal replica x shard: 1 x 8, 2 x 4"),
        (MeshSpec(replica=3, shard=0), "replica 3 x shard 2 = 6 ranks, but the job has 8"),
        (MeshSpec(replica=16, shard=0), "replica 16 x shard 1 = 16 ranks, but the job has 8"),
        (MeshSpec(replica=2, shard=0, expert=3), "expert = 3 does not divide shard = 4; legal: 1, 2, 4"),
        (MeshSpec(sparse_replica=2, sparse_shard=2), "sparse_replica 2 x sparse_shard 2 = 4 ranks, but the job has 8"),
    ],
)
def test_an_impossible_product_lists_the_legal_choices(spec, message):
    with pytest.raises(UserError) as error:
        spec.resolve(8)
    assert message in str(error.value)


def test_a_degree_below_one_is_refused():
    with pytest.raises(UserError, match="config mesh.expert = 0: must be at least 1; set --mesh.expert 1 or more"):
        MeshSpec(expert=0)


ONE_PROCESS = """
from opengem import mesh
print(mesh.start("cpu"))
m = mesh.build(mesh.MeshSpec(), "cpu")
with mesh.fail_together():
    print(m.dense.shape, m.experts.shape, m.sparse.shape, m.sparse["sparse_replica"].size())
"""

FAILING = """
import sys, torch, torch.distributed as dist
from opengem import mesh
from opengem.errors import UserError
rank, world = mesh.start("cpu")
m = mesh.build(mesh.MeshSpec(sparse_replica=2), "cpu")
assert m.sparse.get_local_rank("sparse_replica") == rank
with mesh.fail_together():
    dist.barrier()
    if rank == FAILS:
        raise UserError("feature 'x': id 11")
    dist.all_reduce(torch.ones(1))
"""


ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))  # so that a clone need not be installed


def test_one_process_has_every_axis():
    command = [sys.executable, "-c", ONE_PROCESS]
    out = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=True)
    assert out.stdout.splitlines() == ["(0, 1)", "(1, 1) (1, 1, 1) (1, 1) 1"]


@pytest.mark.multi
@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_on_one_rank_ends_all_with_its_message(fails, tmp_path):
    """The other rank waits in a collective that the failing rank never joins; it must end within 20 s, not 10 min."""
    script = tmp_path / "job.py"
    script.write_text(FAILING.replace("FAILS", str(fails)))
    env = dict(ENVIRONMENT, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29600 + os.getpid() % 300 + fails))
    jobs = [
        subprocess.Popen([sys.executable, str(script)], env=dict(env, RANK=str(r)), stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    begin = time.monotonic()
    errors = [job.communicate(timeout=60)[1] for job in jobs]
    assert "UserError: feature 'x': id 11" in errors[fails]
    assert f"rank {1 - fails} stops because rank {fails} failed: UserError: feature 'x': id 11" in errors[1 - fails]
    assert jobs[1 - fails].returncode == 2
    assert time.monotonic() - begin < 40  # two imports of torch included
