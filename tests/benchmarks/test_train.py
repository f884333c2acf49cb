"""Every rung of the training ladder computes what the package computes, so that only speed differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import train, train_ne, train_plain
from benchmarks.run import record
from benchmarks.train_baseline import Baseline
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.kernels.block.op import block_attention
from opengem.kernels.chain.op import chained_norms
from opengem.kernels.gdpa.op import gdpa
from opengem.kernels.norm.op import layer_norm
from opengem.kernels.pool.op import average_and_count, modulated_norm
from opengem.kernels.rope.op import apply_rope, rope_tables
from tests import small
from tests.model.sample import SMALL, embed, make_batch
from tests.model.test_gem import LENGTHS, model, opened


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("change", [{}, {"rope": True, "time_encoding": False}, {"schedule": "F"}, {"rope": False,
                                    "time_encoding": False}, {"feature_hidden": 8}])  # fmt: skip
def test_the_padded_baseline_gives_the_logits_and_gradients_of_the_model(change):
    streams = tuple(replace(stream, attention="block") for stream in SMALL.streams)
    gem, batch = opened(model(replace(SMALL, streams=streams, **change))), make_batch(LENGTHS)
    found = []
    for run in (gem, Baseline(gem, compiled=False)):
        gem.zero_grad()
        logits = run(batch, embed(batch))
        sum(value.square().sum() for value in logits.values()).backward()
        found.append((logits, [p.grad.clone() for p in gem.parameters()]))
    for name in found[0][0]:
        torch.testing.assert_close(found[1][0][name], found[0][0][name], atol=1e-5, rtol=1e-4)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-3)


def _jagged(lengths, heads=2, dim=8):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, dim) for _ in range(3))
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0)


LISTS = ([3, 0, 9, 64, 1], [5], [0, 0], [])


@pytest.mark.parametrize("lengths", LISTS)
def test_stand_ins_of_attention_are_the_ops(lengths):
    q, k, v, offsets = _jagged(lengths)
    longest = max(lengths, default=0)
    rope = rope_tables(max(longest, 1), 8)
    same = {
        "block": (train_plain.block_attention, block_attention, (q, k, v, offsets),
                  {"max_length": longest, "block": 4, "rope": rope}),
        "gdpa": (train_plain.gdpa, gdpa, (q, k, v, offsets, offsets),
                 {"max_q": longest, "max_kv": longest, "activation": "relu", "scale": 0.5}),
        "rope": (train_plain.apply_rope, apply_rope, (q, offsets, *rope), {"max_length": longest}),
    }  # fmt: skip
    for name, (plain, op, arguments, options) in same.items():
        if name == "gdpa" and not lengths:
            continue  # a step has at least one sample
        got, wanted = plain(*arguments, **options), op(*arguments, **options)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4, msg=name)
    if lengths:
        seeds = torch.randn(3 * len(lengths), 2, 8), torch.arange(len(lengths) + 1) * 3
        options = {"max_q": 3, "max_kv": longest, "counting": 1}
        arguments = seeds[0], torch.cat([q, k], 1), seeds[1], offsets
        torch.testing.assert_close(
            train_plain.average_and_count(*arguments, **options), average_and_count(*arguments, **options))


def test_stand_ins_of_norms_are_the_ops():
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    plain, close = train_plain.layer_norm, {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(plain(x), layer_norm(x), **close)
    torch.testing.assert_close(plain(x, residual=residual), layer_norm(x, residual=residual), **close)
    arguments = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(train_plain.chained_norms(*arguments), chained_norms(*arguments), **close)
    arguments = torch.randn(3, 8), torch.randn(2, 8), torch.randn(2, 8)
    torch.testing.assert_close(train_plain.modulated_norm(*arguments), modulated_norm(*arguments), **close)


def test_the_ladder_ends_at_equal_ne_and_its_rows_are_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STREAM", {"users": 16, "samples": 256, "lengths": "lognormal(40)", "max_length": 80,
                                          "streams": 1, "base_rate": 0.3})  # fmt: skip
    config = small.config()
    some = ("baseline", "jagged", "sparse")
    rows = train.run(tmp_path / "rows.jsonl", True, some, samples=96, batch=32, config=config, device="cpu")
    assert [row["impl"] for row in rows] == list(some)
    assert all(row["ne"] == pytest.approx(rows[0]["ne"], abs=1e-4) for row in rows)
    names = [rung.technique for rung in train.LADDER]
    for row in rows:
        assert row["techniques"] == names[: names.index(row["impl"]) + 1]
        assert row["op"] == "train" and row["samples_per_s"] > 0
        assert row["local_mfu"] is None and row["e2e_mfu"] is None and row["tflop_per_step"] > 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)


def test_another_order_holds_the_same_samples():
    batch = make_batch(LENGTHS)
    other = train.reordered(batch, 1)
    places = [other.rows.tolist().index(row) for row in batch.rows.tolist()]
    assert places != sorted(places)
    for name, x in batch.sequences.items():
        assert all(torch.equal(a, other.sequences[name].to_list()[i])
                   for a, i in zip(x.to_list(), places, strict=True))
    assert torch.equal(other.labels["click"][places], batch.labels["click"])


def test_every_order_of_a_rung_has_the_same_ne(tmp_path):
    row = train_ne.run(small.config(), torch.device("cpu"), tmp_path / "rows.jsonl", 96, 32, ("baseline",))[0]
    assert row["ne_orders"] == pytest.approx([row["ne"]] * 2, abs=1e-4) and row["ne_orders"][1] != row["ne"]


def test_an_unknown_rung_is_refused():
    """It was passed over, and the last rung measured in its place."""
    with pytest.raises(UserError, match=r"no rung.*'jaged'.*known: baseline, jagged"):
        train.run(None, False, ("jaged",), device="cpu")


def test_rows_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path, tmp_path / "file" / "rows.jsonl"):
        with pytest.raises(UserError, match=r"cannot be written.*--out"):
            record({}, "", out)


def test_every_stand_in_replaces_a_name_of_the_model():
    for names in train.STAND_INS.values():
        for name in names:
            assert any(hasattr(module, name) for module in train.MODULES), name


def test_overhead_of_the_log_is_measured(tmp_path):
    row = train.overhead(None, config=small.config(), rounds=1, steps=2, repeats=3, device="cpu")[0]
    assert row["case"] == "logging_overhead" and len(row["loops_s"]) == 1
    calls = row["calls_us"]
    assert list(calls) == ["count", "add", "line"] and min(calls.values()) > 0
    each = calls["count"] + calls["add"] + calls["line"] / 2
    assert row["at_most"] == pytest.approx(each / 1e3 / row["step_ms"])


def test_padded_rows_of_a_jagged_batch_come_back_in_place():
    x = Jagged.from_lengths(torch.randn(6, 1, 2), torch.tensor([2, 0, 4]))
    padded, rows = train_plain._pad(x.values, x.offsets, 5)
    assert torch.equal(padded, x.to_padded(size=5)) and torch.equal(padded.flatten(0, 1)[rows], x.values)
