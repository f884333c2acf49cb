"""The whole model on random jagged batches: independence of samples, empty input, gradients, FLOPs, compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import opengem.efficiency.counting  # noqa: F401 (products that are added in place count)
from opengem.config import StreamConfig
from opengem.data.schema import Feature, Label, Schema
from opengem.errors import UserError
from opengem.jagged import Jagged
from opengem.model.gem import GEM, stream_config
from tests.model.sample import EMBEDDING_DIM, FEATURES, NOW, SCHEMA, SMALL, embed, make_batch, take

LENGTHS = {"buy": [3, 0, 9, 64, 1, 0], "view": [0, 0, 5, 7, 2, 64]}


TAPS = replace(SMALL, streams=tuple(replace(stream, taps=3) for stream in SMALL.streams))
MORE = replace(SMALL, tower_dim=4, feature_hidden=8)
CONFIGS = pytest.mark.parametrize("config", [SMALL, TAPS, MORE], ids=["plain", "taps", "more"])


def model(config=SMALL, schema=SCHEMA, features=None) -> GEM:
    torch.manual_seed(1)
    return GEM(schema, FEATURES if features is None else features, config, EMBEDDING_DIM)


def opened(gem: GEM) -> GEM:
    """With the zero-initialised gates opened, so that nothing is hidden behind them, and a loud last layer."""
    with torch.no_grad():
        for name, parameter in gem.named_parameters():
            if "cross_layer.gate" in name or "opening" in name:
                parameter.fill_(0.5)
            if name.endswith("out.weight") and "heads" in name:
                parameter.mul_(50)
    return gem


def test_one_finite_logit_a_label_and_sample():
    batch = make_batch(LENGTHS)
    logits = model()(batch, embed(batch))
    assert list(logits) == ["click", "convert"]
    for value in logits.values():
        assert value.shape == (6,) and value.dtype == torch.float32 and value.isfinite().all()


@CONFIGS
def test_a_sample_alone_gives_the_logits_it_gives_in_a_batch(config):
    """K8: nothing is scaled or normalised by batch mates."""
    batch, gem = make_batch(LENGTHS), opened(model(config))
    together = gem(batch, embed(batch))
    assert together["click"].std() > 1e-3
    for index in range(batch.batch_size):
        one = take(batch, index)
        for name, value in gem(one, embed(one)).items():
            torch.testing.assert_close(value[0], together[name][index], atol=1e-5, rtol=1e-4)


def test_max_length_sizes_buffers_and_never_enters_the_result():
    """K8: a user of length 2 gives the same logit whatever the longest history of the batch may be."""
    batch, gem = make_batch(LENGTHS), opened(model())
    shorter = {name: Jagged(value.values, value.offsets, 64) for name, value in batch.sequences.items()}
    longer = {name: Jagged(value.values, value.offsets, 500) for name, value in batch.sequences.items()}
    a, b = (gem(replace(batch, sequences=s), embed(replace(batch, sequences=s))) for s in (shorter, longer))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, {"buy": [0, 0], "view": [0, 0]}, {"buy": [], "view": []}])
@pytest.mark.parametrize("schedule", ["GS", "F", "G"])
@CONFIGS
def test_every_gradient_is_there_and_finite(lengths, schedule, config, poisoned_empty):
    """Empty histories and an empty batch are ordinary; no parameter is left out of the graph (FSDP needs it)."""
    gem = model(replace(config, schedule=schedule, layers=3))
    batch = make_batch(lengths)
    embedded = embed(batch)
    logits = gem(batch, embedded)
    sum(value.sum() for value in (*logits.values(), *(logits.towers or ()))).backward()
    for name, parameter in gem.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    for value in embedded.sequences.values():
        assert value.values.grad.isfinite().all()


def test_the_history_and_the_candidate_matter():
    gem = opened(model())
    batch = make_batch(LENGTHS)
    embedded = embed(batch)
    gem(batch, embedded)["click"].sum().backward()
    assert embedded.features["item"].grad.abs().sum() > 0
    for value in embedded.sequences.values():
        assert value.values.grad.abs().sum() > 0


@pytest.mark.parametrize("schedule", ["GS", "FS", "G"])
@pytest.mark.parametrize("lengths", [LENGTHS, {"buy": [64] * 3, "view": [64] * 3}, {"buy": [0], "view": [0]}])
@CONFIGS
def test_flops_equal_what_pytorch_counts(schedule, lengths, config):
    """M2: window and block attention count what their mask lets through, on the real lengths."""
    gem = model(replace(config, schedule=schedule))
    batch = make_batch(lengths)
    embedded = embed(batch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gem(batch, embedded)
    zeros = sum(structural_zeros(gem.events[name], sum(lengths[name])) for name in lengths)
    zeros += sum(missing_tokens(layer.experts, batch.batch_size) for layer in gem.layers)
    assert sum(gem.flops(lengths).values()) == counter.get_total_flops() - zeros


def missing_tokens(experts, samples: int) -> int:
    """The zeros behind the tokens of every expert go through its maps along the tokens and through X (Xᵀ Y)."""
    maps = experts.shortcut.shape[1] + 2 * experts.project.shape[1]
    return 2 * samples * experts.experts * (-experts.each % 8) * maps * experts.dim


def structural_zeros(tokenizer, events: int) -> int:
    """What is multiplied by known zeros: padding columns, and attributes that a candidate's feature has no part in."""
    columns = (len(tokenizer.ids) - 1) * EMBEDDING_DIM * len(tokenizer.pairs)
    return 2 * events * (columns + tokenizer.padding * tokenizer.inner.out_features)


def test_tables_are_no_parameters_and_lookups_no_flops():
    """M3: an embedding-heavy data set changes neither count."""
    wide = replace(SCHEMA, features=tuple(replace(f, rows=10**6) if f.name == "user" else f for f in FEATURES))
    small, large = model(), model(schema=wide, features=list(wide.features))
    assert small.num_parameters() == large.num_parameters()
    assert small.flops(LENGTHS) == large.flops(LENGTHS)


def test_empty_histories_cost_less_and_an_empty_batch_nothing():
    gem = model()
    assert sum(gem.flops({"buy": [], "view": []}).values()) == 0
    empty = gem.flops({"buy": [0], "view": [0]})
    assert empty["self_attention"] == empty["events"] == 0


def test_stream_without_streams_and_without_item_features():
    features = (Feature("age", "dense"), Feature("hour", rows=24))
    schema = Schema("flat", (), features, (Label("click"),), {"train": (0, 1)})
    gem = model(schema=schema, features=list(schema.features))
    batch = make_batch(LENGTHS)
    bare = replace(batch, sequences={}, features={k: batch.features[k] for k in ("age", "hour")})
    logits = gem(bare, embed(batch))
    assert logits["click"].shape == (6,)
    assert sum(gem.flops({}).values()) > 0


def test_stream_entries_are_taken_by_name_then_by_star():
    assert stream_config(SMALL, "buy").window == 4
    assert stream_config(SMALL, "anything").name == "*"
    with pytest.raises(UserError, match="no entry for stream 'view'.*add one"):
        stream_config(replace(SMALL, streams=(StreamConfig("buy"),)), "view")


def test_a_stream_stops_after_its_layers():
    gem = model()
    assert "view" in gem.layers[0].streams and "view" not in gem.layers[1].streams


def test_parts_of_the_config_switch_off():
    off = replace(SMALL, match=False, rope=False, time_encoding=False, cross_layer_attention=False, fm_tokens=0,
                  counting_heads=0, recent_tokens=0)  # fmt: skip
    batch = make_batch(LENGTHS)
    for config in (off, replace(off, counting_heads=1), replace(off, rope=True), replace(off, time_encoding=True)):
        gem = model(config)
        assert gem.layers[1].cross_layer is None
        assert gem(batch, embed(batch))["click"].isfinite().all()
        assert gem.num_parameters() < model().num_parameters()


@CONFIGS
def test_bfloat16_autocast_agrees_with_float32(config):
    batch, gem = make_batch(LENGTHS), opened(model(config))
    exact = gem(batch, embed(batch))
    with torch.autocast("cpu", torch.bfloat16):
        rough = gem(batch, embed(batch))
    for name in exact:
        assert rough[name].dtype == torch.float32
        torch.testing.assert_close(rough[name], exact[name], atol=0.15, rtol=0.15)


@CONFIGS
def test_compiled_model_agrees(config):
    batch, gem = make_batch(LENGTHS), opened(model(config))
    wanted = gem(batch, embed(batch))
    torch._dynamo.reset()
    compiled = torch.compile(gem, backend="aot_eager")
    embedded = embed(batch)
    got = compiled(batch, embedded)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], atol=1e-5, rtol=1e-4)
    assert (got.towers is None) == (wanted.towers is None)
    torch.testing.assert_close(got.towers or (), wanted.towers or ())
    sum(value.sum() for value in (got["click"], *(got.towers or ()))).backward()
    assert all(parameter.grad is not None for name, parameter in gem.named_parameters() if "convert" not in name)


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [1, 3])
def test_gpu_bfloat16_agrees_with_cpu(taps):
    wide = replace(SMALL, dim=64, streams=(StreamConfig("*", max_length=64, dim=64, heads=1, window=64, taps=taps),))
    batch, gem = make_batch(LENGTHS), opened(model(wide))
    exact = gem(batch, embed(batch))
    gem, moved = gem.cuda(), batch.to("cuda")
    embedded = embed(batch)
    embedded = type(embedded)(
        {k: v.to("cuda") for k, v in embedded.sequences.items()}, {k: v.cuda() for k, v in embedded.features.items()}
    )
    with torch.autocast("cuda", torch.bfloat16):
        rough = gem(moved, embedded)
        again = gem(moved, embedded)
    sum(value.sum() for value in rough.values()).backward()
    for name in exact:
        torch.testing.assert_close(rough[name].cpu(), exact[name], atol=0.15, rtol=0.15)
        assert torch.equal(rough[name], again[name])
    assert all(parameter.grad.isfinite().all() for parameter in gem.parameters())


def test_request_time_counts_in_gaps_not_in_dates():
    """The same history asked a year later with everything shifted gives the same logits."""
    batch, gem = make_batch(LENGTHS), opened(model())
    year = 31_536_000
    later = replace(
        batch,
        timestamps=batch.timestamps + year,
        sequences={k: v.map(lambda t: t + year) if "timestamp" in k else v for k, v in batch.sequences.items()},
    )
    assert NOW + year == int(later.timestamps[0])
    for name, value in gem(batch, embed(batch)).items():
        assert torch.equal(value, gem(later, embed(later))[name])
