"""What a job refuses, and that its checkpoint fits it whatever the data set lacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from opengem import checkpoint
from opengem.config import StreamConfig
from opengem.data.schema import Schema
from opengem.data.store import Writer
from opengem.efficiency import workload
from opengem.errors import UserError
from opengem.job import build, open_run, run_config
from opengem.train import train
from tests import small


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("small") / "data")


def _without_histories(folder, schema=small.SCHEMA):
    r, rows = np.random.default_rng(0), 200
    user, candidate = r.integers(0, small.USERS, rows), r.integers(0, small.ITEMS, rows)
    columns = {"user": user, "timestamp": np.linspace(0, 990_000, rows).astype(np.int64), "member": user}
    columns |= {"candidate": candidate, "hour": np.zeros(rows, np.float32), "popularity": np.zeros(rows, np.float32)}
    columns |= {"click": (candidate % 2).astype(np.float32), "convert": np.zeros(rows, np.float32)}
    with Writer(folder, replace(schema, streams=())) as writer:
        writer.write_events({}, [f"u{i}" for i in range(small.USERS)])
        writer.write_samples(columns)
    return folder


def test_a_data_set_without_histories_trains_and_its_checkpoint_loads(tmp_path):
    """Parameters that no loss reaches had no optimiser state, so the checkpoint lacked keys that loading asks for."""
    folder, run = _without_histories(tmp_path / "data"), tmp_path / "run"
    train(small.config(steps=3), folder, run, with_baselines=False)
    assert open_run(run, folder).step == open_run(run, folder).total_steps == 3
    assert all(p.grad is None for p in open_run(run, folder).model.parameters())


@pytest.mark.parametrize("missing, towers", [((), True), (("item",), False), (("user",), False)])
def test_towers_train_where_user_and_candidate_have_ids_and_are_left_out_elsewhere(tmp_path, capsys, missing, towers):
    features = tuple(replace(f, role="context" if f.role in missing else f.role) for f in small.SCHEMA.features)
    features = tuple(replace(f, role="item" if f.name == "member" and "user" in missing else f.role) for f in features)
    folder = _without_histories(tmp_path / "data", replace(small.SCHEMA, features=features))
    train(small.config(tower_dim=8, steps=3), folder, tmp_path / "run", with_baselines=False)
    assert (open_run(tmp_path / "run", folder).model.towers is not None) == towers
    assert ("no in-batch softmax" in capsys.readouterr().out) != towers
    bare = build(small.config(tower_dim=8), Schema.load(folder))
    bare.config = replace(bare.config, optim=replace(bare.config.optim, in_batch_softmax=0.0))
    batch = next(iter(bare.loader(folder, "train", training=True)))
    logits, whole = bare.forward(batch), build(small.config(tower_dim=8), Schema.load(folder))
    assert (whole.loss(logits, batch) > bare.loss(logits, batch) + 0.3) == towers  # half the log of the contrasts


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("optim", {"task_weights": {"clik": 2.0}}, "'clik'.*'click'"),
        ("model", {"streams": (StreamConfig(dim=16), StreamConfig("vew", dim=16))}, "'vew'.*'view'"),
    ],
)
def test_a_name_the_data_set_does_not_have_is_refused(data, section, change, named):
    config = small.config()
    config = replace(config, **{section: replace(getattr(config, section), **change)})
    with pytest.raises(UserError, match=named):
        build(config, Schema.load(data))


def test_a_checkpoint_of_swapped_inputs_is_refused_though_every_shape_fits(data, tmp_path):
    """Two dense features in another order have the same tensors and another meaning."""
    config = replace(small.config(), data=replace(small.config().data, optional_features=("*",)))
    job = build(config, Schema.load(data))
    saved = checkpoint.save(tmp_path, 1, job.state("{}"), keep=1)
    features = (*small.SCHEMA.features[:2], *reversed(small.SCHEMA.features[2:]))
    with pytest.raises(UserError, match="other inputs or labels"):
        build(config, replace(small.SCHEMA, features=features)).restore(saved)
    assert build(config, small.SCHEMA).restore(saved) == "{}"


def test_a_checkpoint_of_a_deeper_model_is_refused(data, tmp_path):
    config = small.config()
    saved = checkpoint.save(tmp_path, 1, build(config, Schema.load(data)).state("{}"), keep=1)
    shallow = replace(config, model=replace(config.model, layers=1))
    with pytest.raises(UserError, match="another model"):
        build(shallow, Schema.load(data)).restore(saved)


def test_a_config_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        run_config(tmp_path)


@pytest.mark.parametrize(
    "change", [{"counting_heads": 0}, {"activation": "relu"}, {"time_scale_s": 60.0}, {"window": 32}]
)
def test_a_checkpoint_of_another_model_with_the_same_tensors_is_refused(data, tmp_path, change):
    """Heads that count were taken up as heads that average, in silence; longer histories are no other model."""
    config = replace(small.config(), model=replace(small.config().model, schedule="GG"))
    saved = checkpoint.save(tmp_path, 1, build(config, Schema.load(data)).state("{}"), keep=1)
    stream = replace(config.model.streams[0], window=change.pop("window", config.model.streams[0].window))
    with pytest.raises(UserError, match="another model"):
        other = replace(config, model=replace(config.model, streams=(stream,), **change))
        build(other, Schema.load(data)).restore(saved)
    longer = replace(config.model.streams[0], name="view", max_length=99)
    assert build(replace(config, model=replace(config.model, streams=(longer,))), Schema.load(data)).restore(saved)


def test_tables_of_a_later_pass_depend_on_the_seed(data):
    """The second pass started from the same tables whatever `train.seed` was."""
    from opengem.train import Feed, Progress

    rows = []
    for seed in (3, 4):
        job = build(small.config(seed=seed), Schema.load(data))
        job.total_steps = 1
        loader = job.loader(data, "train", training=True)
        loader.load_state_dict(loader.state_dict() | {"row": loader.num_rows})
        next(iter(Feed(job, loader, Progress.of(job))))
        rows.append(job.embeddings.state_dict()["weight"]["item"].clone())
    assert not torch.equal(*rows)


@pytest.mark.gpu
def test_a_training_step_never_waits_for_the_device():
    """A sum of one-number tensors and another one was read by the host in every step, which left the device idle."""
    config = small.config(tower_dim=8)
    config = replace(config, train=replace(config.train, device="cuda"))
    job = build(config, workload.schema(config, 2))
    batch = workload.batch(job.schema, job.max_lengths, 12).to(job.device)
    for strict in (False, False, True):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            job.learn(job.loss(job.forward(batch), batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
