"""Training end to end on a small set: it learns, a kill changes nothing, a NaN stops it, every run folder is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opengem import checkpoint
from opengem.config import to_json
from opengem.data.labels import base_rates
from opengem.data.schema import Schema
from opengem.errors import NonFiniteError, UserError
from opengem.evaluate import evaluate_split, predict
from opengem.job import Job, build, open_run
from opengem.loss import Meter
from opengem.runlog import read_metrics
from opengem.train import train
from tests import small

ROOT = Path(__file__).resolve().parent.parent
LEARN, LOSS = Job.learn, Job.loss
TIMING = {"samples_per_s", "tokens_per_s", "useful_tflops", "mfu", "elapsed_s", "memory_bytes", "memory"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("small") / "data")


def _values(run: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMING} for line in read_metrics(run)]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    return run, train(small.config(), data, run, with_baselines=False)


def test_a_run_leaves_the_documented_files(whole):
    run, summary = whole
    assert {"config.json", "metrics.jsonl", "summary.json", "tensorboard", "checkpoints"} <= set(os.listdir(run))
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert {"ne", "auc", "logloss", "calibration", "rows"} <= set(summary["splits"]["test"]["click"])
    assert summary["environment"]["torch"] == torch.__version__


def test_it_learns_what_the_candidate_says(whole):
    _, summary = whole
    assert summary["splits"]["test"]["click"]["auc"] > 0.7


def test_logged_ne_is_progressive(data, tmp_path):
    """The first line's NE comes from untrained logits on rows not learned from: about 1, far from the fitted value."""
    run = tmp_path / "run"
    train(small.config(log_every=1, steps=1), data, run, with_baselines=False)
    assert read_metrics(run)[0]["tasks"]["click"]["ne"] == pytest.approx(1.0, abs=0.15)


def test_resume_after_an_early_stop_gives_the_same_values(data, whole, tmp_path):
    """Stopped by an error between two saves, resumed: every value of metrics.jsonl is that of the whole run."""
    run = tmp_path / "run"
    calls = []

    def stop_at_8(self, loss):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return LEARN(self, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opengem.job.Job.learn", stop_at_8)
        with pytest.raises(KeyboardInterrupt):
            train(small.config(), data, run, with_baselines=False)
    summary = train(small.config(), data, run, with_baselines=False)
    assert _values(run) == _values(whole[0])
    assert summary["splits"] == whole[1]["splits"]


def test_sigkill_at_a_random_step_then_resume_gives_the_same_values(data, whole, tmp_path):
    run = tmp_path / "run"
    recipe = tmp_path / "recipe.json"
    recipe.write_text(to_json(small.config()))
    flags = ["--data", str(data), "--out", str(run), "--no-baselines"]
    command = [sys.executable, "-m", "opengem", "train", str(recipe), *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wanted = int(np.random.default_rng().integers(2, 6))
    deadline = time.monotonic() + 120
    while len(read_metrics(run)) < wanted and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), errors
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert _values(run) == _values(whole[0])


def test_a_non_finite_gradient_stops_before_the_step_and_keeps_the_last_checkpoint(data, tmp_path):
    run = tmp_path / "run"
    seen = []

    def poisoned(self, logits, batch):
        seen.append({k: v.clone() for k, v in self.model.state_dict().items()})
        loss = LOSS(self, logits, batch)
        return loss * float("nan") if len(seen) == 5 else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opengem.job.Job.loss", poisoned)
        with pytest.raises(NonFiniteError, match=r"step 5, rows \d+ to \d+"):
            train(small.config(), data, run, with_baselines=False)
    newest = checkpoint.find(run / "checkpoints")
    assert newest.name == "step-000000003"
    job = build(small.config(), Schema.load(data))
    job.restore(newest)
    assert all(v.isfinite().all() for v in job.model.state_dict().values())
    assert job.embeddings.state_dict()["weight"]["item"].isfinite().all()
    assert not (run / "summary.json").exists()


def test_nan_in_one_step_leaves_parameters_and_tables_untouched(data):
    job = build(small.config(), Schema.load(data))
    batch = next(iter(job.loader(data, "train", training=True)))
    before = {k: v.clone() for k, v in job.model.state_dict().items()}
    tables = {k: v.clone() for k, v in job.embeddings.state_dict()["weight"].items()}
    loss = job.loss(job.forward(batch), batch) * float("inf")
    assert not job.learn(loss).finite()
    assert not job.learn(job.loss(job.forward(batch), batch)).finite()  # a later step may be under way already
    assert all(torch.equal(v, before[k]) for k, v in job.model.state_dict().items())
    assert all(torch.equal(v, tables[k]) for k, v in job.embeddings.state_dict()["weight"].items())


def test_a_job_that_met_a_nan_learns_again_from_a_checkpoint(data, whole):
    """The flag that stops all later steps stayed up; a checkpoint without fused steps failed in the first one."""
    job = build(small.config(), Schema.load(data))
    batch = next(iter(job.loader(data, "train", training=True)))
    assert not job.learn(job.loss(job.forward(batch), batch) * float("nan")).finite()
    for group in job.optimizer.param_groups:
        group["fused"] = None
    job.restore(checkpoint.find(whole[0] / "checkpoints"))
    before = {k: v.clone() for k, v in job.model.state_dict().items()}
    assert job.learn(job.loss(job.forward(batch), batch)).finite()
    assert any(not torch.equal(v, before[k]) for k, v in job.model.state_dict().items())


def test_a_run_folder_is_not_mixed_with_another_config(data, whole):
    run, _ = whole
    with pytest.raises(UserError, match="another config"):
        train(replace(small.config(), name="other"), data, run, with_baselines=False)
    with pytest.raises(UserError, match="already holds a run"):
        train(small.config(), data, run, resume="never", with_baselines=False)


def test_a_checkpoint_goes_on_with_shorter_histories(data, whole, tmp_path):
    """The counts by length of the first run did not fit into those of the second."""
    config = small.config()
    stream = replace(config.model.streams[0], max_length=3)
    shorter = replace(config, model=replace(config.model, streams=(stream,)))
    source = sorted((whole[0] / "checkpoints").glob("step-*"))[0]
    summary = train(shorter, data, tmp_path / "run", resume=str(source), with_baselines=False)
    assert sum(summary["lengths"]["view.timestamp"]) == sum(whole[1]["lengths"]["view.timestamp"])


def test_a_checkpoint_given_by_path_does_not_mix_runs(data, whole, tmp_path):
    run, _ = whole
    newest = str(checkpoint.find(run / "checkpoints"))
    with pytest.raises(UserError, match="another config"):
        train(small.config(log_every=3), data, run, resume=newest, with_baselines=False)
    with pytest.raises(UserError, match="no complete checkpoint"):
        train(small.config(), data, tmp_path / "new", resume="atuo", with_baselines=False)
    assert not (tmp_path / "new").exists()


def test_a_missing_evaluation_split_is_told_before_the_first_step(data, tmp_path):
    config = replace(small.config(), data=replace(small.config().data, eval_splits=("test", "tset")))
    with pytest.raises(UserError, match="no split 'tset'"):
        train(config, data, tmp_path / "run", with_baselines=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("shuffle_rows", "prefetch"), [(0, 0), (100, 3)])
def test_resume_across_the_end_of_a_pass(data, tmp_path, shuffle_rows, prefetch):
    """Stopped at the last step of the first pass and at the first of the second, with a save in between."""
    config = small.config(epochs=2, steps=20, save_every=17, log_every=1)
    config = replace(config, data=replace(config.data, shuffle_rows=shuffle_rows, prefetch=prefetch))
    train(config, data, tmp_path / "whole", with_baselines=False)
    calls = []

    def stop(self, loss):
        calls.append(1)
        if len(calls) in (17, 17 + 18):
            raise KeyboardInterrupt
        return LEARN(self, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opengem.job.Job.learn", stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train(config, data, tmp_path / "run", with_baselines=False)
    train(config, data, tmp_path / "run", with_baselines=False)
    assert _values(tmp_path / "run") == _values(tmp_path / "whole")


def test_second_pass_starts_with_new_tables(data, tmp_path):
    run = tmp_path / "run"
    config = small.config(epochs=2, save_every=0)
    summary = train(config, data, run, with_baselines=False)
    steps = -(-540 // 32)
    assert summary["steps"] == 2 * steps
    assert {line["epoch"] for line in read_metrics(run)} == {0, 1}


def test_training_forward_equals_predict_on_the_same_rows(data, whole, tmp_path):
    """Train/serve parity: the probabilities of the Parquet file are those of the training forward, row by row."""
    import pyarrow.parquet as pq

    job = open_run(whole[0], data)
    out = tmp_path / "p.parquet"
    assert predict(job, data, "train", out) == 540
    table = pq.read_table(out)
    job.model.train()
    probabilities, rows = [], []
    for batch in job.loader(data, "train", training=True):
        probabilities.append(job.forward(batch)["click"].detach().sigmoid())
        rows.append(batch.rows)
        job.embeddings.discard()
    assert torch.equal(torch.cat(rows), torch.from_numpy(table["row"].to_numpy()))
    served = torch.from_numpy(table["click"].to_numpy().copy())
    torch.testing.assert_close(torch.cat(probabilities), served, rtol=1e-5, atol=1e-6)


def test_progressive_evaluation_learns_and_leaves_the_run_alone(data, whole):
    rates = base_rates(data, Schema.load(data), "train")
    before = checkpoint.find(whole[0] / "checkpoints")
    strict = evaluate_split(open_run(whole[0], data), data, "test", rates)
    job = open_run(whole[0], data)
    progressive = evaluate_split(job, data, "test", rates, progressive=True)
    assert strict["click"]["rows"] == progressive["click"]["rows"]
    assert strict["click"]["ne"] != progressive["click"]["ne"]
    assert checkpoint.find(whole[0] / "checkpoints") == before


def test_lengths_and_padding_are_counted_over_batches_of_different_maximum():
    from opengem.data.batch import Batch
    from opengem.jagged import Jagged
    from opengem.train import Progress

    progress = Progress(Meter([], torch.device("cpu")), None, {"view": torch.zeros(9, dtype=torch.int64)}, None)
    for lengths in ([2, 0], [5, 1, 1], []):
        size = len(lengths)
        history = Jagged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths, dtype=int))
        zeros = torch.zeros(size, dtype=torch.int64)
        progress.count(Batch({"view.timestamp": history}, {}, {}, torch.ones(size), zeros, zeros))
    found = progress.counts()
    assert found["lengths"] == {"view.timestamp": [1, 2, 1, 0, 0, 1]}
    assert (found["samples"], found["tokens"], found["padded_tokens"]) == (5, 9, 2 * 2 + 3 * 5)
