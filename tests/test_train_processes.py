"""Training on 1, 2 and 4 Gloo processes is one training: same curve, same checkpoint; an error ends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from opengem import checkpoint
from opengem.config import MeshSpec, to_json
from opengem.errors import UserError
from opengem.evaluate import evaluate_split
from opengem.job import open_run
from opengem.runlog import read_metrics
from opengem.train import train
from tests import small
from tests.sparse.workers import spawn

pytestmark = pytest.mark.multi
GENERATIONS = {
    "v1": ({}, {}),
    "v2": ({"sparse_replica": 2}, {"check_replicas": True}),
    "v3": ({"sparse_replica": 2}, {"fully_shard": True}),
}
CLOSE = {"rel": 1e-6, "abs": 1e-7}


def recipe(name: str = "v1", **train_options):
    """A name may go on with "plain", without the input pipeline, "twice", two passes, and "towers"."""
    name, *how = name.split()
    mesh, sparse = GENERATIONS[name]
    train_options |= {"pipeline": "plain" not in how, "epochs": 2 if "twice" in how else 1}
    base = small.config(8 if "towers" in how else 0, log_every=1, save_every=0, **train_options)
    return replace(base, mesh=replace(base.mesh, **mesh), sparse=replace(base.sparse, **sparse))


def runs(rank: int, world: int, jobs: list[tuple[str, str, str, str, int]]) -> list[dict]:
    """Train each of (generation, data, out, checkpoint or folder of checkpoints to start from, steps)."""
    found = []
    for name, data, out, start, steps in jobs:
        start = str(checkpoint.find(Path(start))) if start.endswith("checkpoints") else start
        summary = train(recipe(name, steps=steps), data, Path(out), start, with_baselines=False)
        found.append(json.loads(json.dumps(summary)))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("small") / "data")


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """The run on one process, all steps and the first six."""
    folder = tmp_path_factory.mktemp("one")
    train(recipe(steps=6), data, folder / "six", with_baselines=False)
    return folder, train(recipe(), data, folder / "whole", with_baselines=False)


def same(lines: list[dict], wanted: list[dict]) -> None:
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for ours, theirs in zip(lines, wanted, strict=True):
        for name in ("samples", "tokens", "timestamp", "lr", "epoch"):
            assert ours[name] == theirs[name], name
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], **CLOSE), (ours["step"], name)
        for task, figures in theirs["tasks_total"].items():
            assert ours["tasks_total"][task] == pytest.approx(figures, **CLOSE)


def test_two_processes_follow_one_in_every_generation_and_resume_each_other(data, one, tmp_path):
    folder, summary = one
    jobs = [(name, str(data), str(tmp_path / name), "auto", 0) for name in GENERATIONS]
    saved = str(next((folder / "six" / "checkpoints").iterdir()))
    jobs.append(("v3", str(data), str(tmp_path / "resumed"), saved, 0))
    first, second = spawn(runs, 2, jobs)
    assert second == [{}] * len(jobs)
    wanted = read_metrics(folder / "whole")
    for name, found in zip(GENERATIONS, first, strict=False):
        same(read_metrics(tmp_path / name), wanted)
        assert found["splits"]["test"]["click"]["ne"] == pytest.approx(summary["splits"]["test"]["click"]["ne"], 1e-5)
        assert found["lengths"] == summary["lengths"] and found["processes"] == 2
    same(read_metrics(tmp_path / "resumed"), wanted[6:])
    # What two wrote, one reads: the score of the test split is the one in the summary.
    rates = summary["base_rates"]
    again = evaluate_split(open_run(tmp_path / "v3", data), data, "test", rates)
    assert again["click"]["logloss"] == pytest.approx(first[2]["splits"]["test"]["click"]["logloss"], rel=1e-6)


def test_two_processes_hold_the_users_of_both_against_the_candidates_of_both(data, tmp_path):
    """The in-batch softmax has contrasts of the global batch, and a run with towers goes on from its checkpoint."""
    wanted = train(recipe("v1 towers"), data, tmp_path / "one", with_baselines=False)
    saved = str(tmp_path / "six" / "checkpoints")
    jobs = [("v1 towers", str(data), str(tmp_path / name), start, steps)
            for name, start, steps in (("whole", "auto", 0), ("six", "auto", 6), ("on", saved, 0))]
    found, *_ = spawn(runs, 2, jobs)
    lines = read_metrics(tmp_path / "one")
    same(read_metrics(tmp_path / "whole"), lines)
    same(read_metrics(tmp_path / "on"), lines[6:])
    assert found[0]["splits"]["test"]["click"]["ne"] == pytest.approx(wanted["splits"]["test"]["click"]["ne"], 1e-5)
    train(recipe("v1", steps=1), data, tmp_path / "bare", with_baselines=False)
    assert lines[0]["loss"] > read_metrics(tmp_path / "bare")[0]["loss"] + 0.3  # half the log of the contrasts


@pytest.mark.parametrize("world", [1, 2])
def test_the_pipeline_changes_no_bit_of_a_run_nor_of_one_that_goes_on(world, data, tmp_path):
    """With batches read ahead a checkpoint holds the position behind the batch that was trained on, not the newest; and
    the end of a pass, where the tables start anew, is not read over."""
    names, jobs = ("v1", "v3") if world == 2 else ("v1",), []
    for name in names:
        saved = str(tmp_path / f"{name} six" / "checkpoints")
        for how, out, start, steps in (
            ("twice", "piped", "auto", 0), ("plain twice", "plain", "auto", 0), ("", "six", "auto", 6),
            ("twice", "on", saved, 0),
        ):  # fmt: skip
            jobs.append((f"{name} {how}", str(data), str(tmp_path / f"{name} {out}"), start, steps))
    spawn(runs, world, jobs)
    for name in names:
        plain, piped, on = (bits_of(tmp_path / f"{name} {out}") for out in ("plain", "piped", "on"))
        assert piped == plain and plain[-1]["epoch"] == 1
        first_pass = [line for line in plain if line["epoch"] == 0]
        assert [line for line in on if line["epoch"] == 0][:1] == plain[6:7] and len(first_pass) > 7
        assert on == plain[6:]


def bits_of(run: Path) -> list[dict]:
    names = ("step", "epoch", "samples", "tokens", "timestamp", "loss", "grad_norm", "tasks_total")
    return [{name: line[name] for name in names} for line in read_metrics(run)]


def test_four_processes_follow_one_and_go_on_from_two(data, one, tmp_path):
    folder, _ = one
    spawn(runs, 2, [("v1", str(data), str(tmp_path / "two"), "auto", 6)])
    saved = str(next((tmp_path / "two" / "checkpoints").iterdir()))
    jobs = [("v2", str(data), str(tmp_path / "four"), "auto", 9), ("v3", str(data), str(tmp_path / "on"), saved, 9)]
    spawn(runs, 4, jobs)
    wanted = read_metrics(folder / "whole")
    same(read_metrics(tmp_path / "four"), wanted[:9])
    same(read_metrics(tmp_path / "on"), wanted[6:9])


FAILING = """
import os
from pathlib import Path
from opengem import cli, mesh
from opengem.data.loader import Loader
read = Loader._batch
def spoiled(self, epoch, position):
    batch = read(self, epoch, position)
    if mesh.rank() == 1 and position == self._batch_size:
        batch.features["candidate"][0] = int(os.environ["BAD_ID"])
        Path(os.environ["MOMENT"]).touch()
    return batch
Loader._batch = spoiled
cli.main()
"""


def torchrun(script: list[str], data: Path, out: Path, config: Path, bad_id: int = 0) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    rest = ["train", str(config), "--data", str(data), "--out", str(out), "--no-baselines"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1", BAD_ID=str(bad_id))
    environment["MOMENT"] = f"{out}.moment"
    return subprocess.run(
        launcher + script + rest, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("bad_id", [small.ITEMS, -1])
def test_torchrun_trains_and_a_bad_id_on_one_rank_ends_both_with_its_message(data, tmp_path, bad_id):
    """The other rank waits for ids that the failing rank never sends."""
    config = tmp_path / "recipe.json"
    config.write_text(to_json(recipe(steps=3, progress=False)))
    if bad_id > 0:
        done = torchrun(["-m", "opengem"], data, tmp_path / "run", config)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("report: ") == 1
        assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    (tmp_path / "failing.py").write_text(FAILING)
    failed = torchrun([str(tmp_path / "failing.py")], data, tmp_path / "failed", config, bad_id)
    assert failed.returncode != 0
    message = f"feature 'candidate', table 'item' of 40 rows: id {bad_id} is out of range, wanted [0, 40)"
    assert f"opengem: {message}" in failed.stderr, failed.stderr[-3000:]
    assert f"rank 0 stops because rank 1 failed: UserError: {message}" in failed.stderr
    assert "exitcode  : 2" in failed.stderr
    assert time.time() - (tmp_path / "failed.moment").stat().st_mtime < 20  # from the moment the bad id was read


def test_a_mesh_that_does_not_fit_or_splits_the_model_is_refused(data, tmp_path):
    for mesh, message in (
        ({"sparse_replica": 2}, "sparse_replica 2 x sparse_shard 1 = 2 ranks, but the job has 1"),
        ({"replica": 0, "shard": 2}, "replica 1 x shard 2 = 2 ranks, but the job has 1"),
    ):
        config = replace(recipe(), mesh=MeshSpec(**mesh))
        with pytest.raises(UserError, match=message):
            train(config, data, tmp_path / "run", with_baselines=False)
