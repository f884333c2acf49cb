"""The profile of a real step on a CPU: all of its time is somewhere, all of its FLOPs too; as text and as HTML."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from opengem import profiling
from opengem.cli import main
from opengem.efficiency import counting, hardware, profile_text, trace, workload
from opengem.efficiency import profile as profiles
from opengem.efficiency.layers import STEP, Part, Ranges, parts, ranged
from opengem.efficiency.report import write as write_report
from opengem.errors import UserError
from opengem.job import build
from tests import small

ROOFS = hardware.Roofs(1.0, 10.0, "test")


@pytest.fixture(scope="module")
def result():
    return profiling.run(small.config(tower_dim=8), None, samples=12, streams=2)


def test_the_layers_sum_to_the_step_within_5_percent(result):
    assert 0.95 < result["accounted"] < 1.05
    assert sum(row["ms"] for row in result["rows"]) == pytest.approx(result["attributed_ms"])


def test_every_layer_has_both_phases_and_the_flops_are_those_of_the_model(result):
    config = small.config(tower_dim=8)
    job = build(config, workload.schema(config, 2))
    batch = workload.batch(job.schema, job.max_lengths, 12)
    lengths = workload.history_lengths(batch)
    layers = parts(job.model, lengths)
    assert sum(part.flops for part in layers) == sum(job.model.flops(lengths).values())
    assert result["flops"] == 3 * sum(part.flops for part in layers)
    by_name = {row["name"]: row for row in result["rows"]}
    for part in layers:
        assert by_name[part.name]["forward_ms"] > 0 and by_name[part.name]["backward_ms"] > 0, part.name
        executed = by_name[part.name]["forward_executed_flops"]
        padded = part.kind in ("events", "experts") and executed > part.flops  # numbers, tokens of an expert
        assert executed == part.flops or padded, part.name
    for owner in ("optimiser", "lookup", "embedding update", "loss", "clip and check"):
        assert by_name[owner]["forward_ms"] > 0, owner
    assert sum(row["backward_executed_flops"] for row in result["rows"]) < 1.05 * 2 / 3 * result["flops"]


def test_without_a_known_peak_there_are_times_and_flops_but_no_mfu(result):
    assert result["peak_tflops"] is None and result["e2e_mfu"] is None and result["local_mfu"] is None
    text = profile_text.text(result)
    assert "no MFU" in text and "MFU 1" not in text and "pooling" in text
    assert result["bound"]["source"] == "measured in this process"


def test_with_a_peak_local_mfu_times_scaling_ratio_is_e2e_mfu(result):
    known = dict(result, peak_tflops=989.5, host_ms=1.0, device="NVIDIA H200")
    known |= profiles.shares(known)
    assert known["local_mfu"] * known["scaling_ratio"] == pytest.approx(known["e2e_mfu"])
    assert 0 < known["e2e_mfu"] < known["e2e_mfu_attention_x2.5"] < 1
    assert "E2E MFU" in profile_text.text(known)
    host = known["conditions"][-1]
    assert host["ms"] == 1.0 and host["mfu_points"] > 0
    assert [c["ms"] for c in known["conditions"][:3]] == [0, 0, 0]


def test_the_page_holds_both_drawings_and_a_report_of_the_folder_too(result, tmp_path):
    known = dict(result, peak_tflops=989.5)
    known |= profiles.shares(known)
    page = profiling.write(known, tmp_path).read_text()
    assert page.count("<svg") == 3 and "<script" not in page
    assert not [link for link in ("src=", "@import") if link in page]
    assert json.loads((tmp_path / "profile.json").read_text())["rows"] == json.loads(json.dumps(known["rows"]))
    (tmp_path / "config.json").write_text("{\"name\": \"x\"}")
    assert "Roofline" in write_report([tmp_path]).read_text()


def test_ranges_leave_the_job_as_it_was():
    config = small.config()
    job = build(config, workload.schema(config, 1))
    batch = workload.batch(job.schema, job.max_lengths, 4)
    before = job.model(batch, job.embeddings(batch))
    job.embeddings.discard()
    with ranged(job.model, parts(job.model, workload.history_lengths(batch)), profiles.phases(job)) as ranges:
        inside = job.model(batch, job.embeddings(batch))
    assert ranges.spans and all(torch.equal(before[k], inside[k]) for k in before)
    assert all(m._compiled_call_impl is None for m in job.model.modules())
    assert not {"forward", "learn", "loss"} & set(vars(job)) and "step" not in vars(job.optimizer)


def test_backward_of_a_compiled_layer_is_still_its_own():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].compile(backend="aot_eager")
    layers = [Part("first", "a", model[0], 1), Part("second", "b", model[1], 1)]
    x = torch.randn(4, 8)
    model(x).sum().backward()
    with ranged(model, layers, {}) as ranges, profile(activities=[ProfilerActivity.CPU]) as profiler, \
            record_function(STEP):  # fmt: skip
        model(x).sum().backward()
    seen = {(i.owner, i.phase) for i in trace.intervals(trace.export(profiler), ranges)}
    assert {("first", "forward"), ("first", "backward"), ("second", "forward"), ("second", "backward")} <= seen


def test_bytes_count_what_must_move_once():
    ranges, a, b = Ranges(), torch.randn(4, 8, requires_grad=True), torch.randn(8, 2)
    run = ranges.wrap("layer", lambda: (a @ b, a.relu(), b.index_select(0, torch.tensor([1, 1])))[0])
    work = counting.count(lambda: run().sum().backward(), ranges, ROOFS)
    forward, backward = work["layer", "forward"], work["layer", "backward"]
    assert forward.flops == 2 * 4 * 8 * 2
    product, gather = 4 * (32 + 16 + 8), 4 * 2 * 4 + 2 * 8  # rows read and written, int64 ids; relu moves nothing
    assert forward.bytes == product + gather
    assert backward.flops == 2 * 4 * 8 * 2
    assert backward.bytes == 4 * (1 + 16 + 32)  # the gradient of a sum is one number, expanded
    assert forward.bound_ms == pytest.approx(max(128 / 1e9, product / 1e7) + gather / 1e7)


def test_a_batch_of_the_largest_size_that_fits(monkeypatch):
    """A size that does not fit is tried again a tenth smaller; the recipe's batch is never exceeded."""
    config = small.config()
    job = build(config, workload.schema(config, 1))
    tried = []

    def batch_of(samples):
        tried.append(samples)
        if samples > 60:
            raise torch.OutOfMemoryError
        return workload.batch(job.schema, job.max_lengths, samples)

    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(profiles, "held", lambda _, batch: 500_000 + 1000 * batch.batch_size)
    properties = type("P", (), {"total_memory": (500_000 + 90_000) / 0.97})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert profiles.largest_batch(job, batch_of, probe=8, limit=500).batch_size == 56
    assert tried == [8, 4, 8, 88, 72, 64, 56]
    assert profiles.largest_batch(job, batch_of, probe=8, limit=20).batch_size == 20
    tried.clear()  # the probe's histories happen to be long: the first size that fits tells
    each = lambda samples: 3000 if samples <= 8 else 1000  # noqa: E731
    monkeypatch.setattr(profiles, "held", lambda _, batch: 500_000 + each(batch.batch_size) * batch.batch_size)
    assert profiles.largest_batch(job, batch_of, probe=8, limit=500).batch_size == 56
    assert tried == [8, 4, 8, 24, 88, 72, 64, 56]


def test_the_command_prints_a_table_and_writes_the_page(tmp_path, capsys):
    recipe = tmp_path / "recipe.json"
    from opengem.config import to_json

    recipe.write_text(to_json(replace(small.config(), name="little")))
    main(["profile", str(recipe), "--samples", "4", "--streams", "1", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "little on" in said and "roof" in said and "exposed communication" in said
    assert (tmp_path / "run" / "profile.html").is_file()


def test_a_data_set_and_wrong_input(tmp_path):
    data = small.write(tmp_path / "data", rows=60)
    found = profiling.run(small.config(), data, samples=8)
    assert found["data"] == "small" and found["samples"] == 8
    with pytest.raises(UserError, match="at least 0"):
        profiling.run(small.config(), None, samples=-1)


def test_random_batches_have_the_recipe_s_shape_and_wanted_lengths():
    config = small.config()
    schema = workload.schema(config, 2)
    batch = workload.batch(schema, {"s0": 16, "s1": 8}, 400, seed=3)
    for stream, longest in (("s0", 16), ("s1", 8)):
        lengths = batch.sequences[f"{stream}.timestamp"].lengths
        assert lengths.max() <= longest and 0.4 < lengths.float().mean() / longest < 0.6
        assert batch.sequences[f"{stream}.a0"].offsets is batch.sequences[f"{stream}.timestamp"].offsets
    assert len(batch.features) == config.model.num_feature_tokens
    fixed = workload.batch(schema, {"s0": 16, "s1": 8}, 5, "constant(7)")
    assert workload.history_lengths(fixed) == {"s0": [7] * 5, "s1": [7] * 5}
    assert workload.batch(schema, {"s0": 16, "s1": 8}, 0).batch_size == 0
