"""Tokens from raw events and features: encodings of numbers, bits, matches with the candidate, counts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from opengem.data.schema import matches
from opengem.jagged import Jagged
from opengem.model.tokenizer import (
    DECAYS_DAYS,
    EventTokenizer,
    FeatureTokenizer,
    NumberEncoding,
    add_taps,
    hats,
    place,
    unpack_bits,
)
from tests.model.sample import EMBEDDING_DIM, FEATURES, SCHEMA, SMALL, embed, make_batch, take

LENGTHS = {"buy": [5, 0, 40, 1], "view": [2, 3, 0, 0]}
BUY = SCHEMA.stream("buy")


def tokenizer(stream=BUY, taps=1, match=True) -> EventTokenizer:
    return EventTokenizer(stream, FEATURES, dataclasses.replace(SMALL, match=match), EMBEDDING_DIM, 16, taps)


def counts_of(batch, stream=BUY, match=True):
    module = tokenizer(stream, match=match)
    return module.counts(module.view(batch), batch)


def test_bits_of_a_mask():
    assert unpack_bits(torch.tensor([0, 1, 6]), 3).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1]]


def test_events_match_candidates_through_shared_tables():
    assert [(a.name, f.name) for a, f in matches(BUY, FEATURES)] == [("product", "item"), ("kind", "item_kind")]
    assert [(a.name, f.name) for a, f in matches(SCHEMA.stream("view"), FEATURES)] == [("seen", "item")]


def test_match_bits_mark_the_candidates_ids():
    batch = make_batch(LENGTHS)
    bits = tokenizer().view(batch).match
    row = batch.sequences["buy.kind"].row_to_sample
    wanted = batch.sequences["buy.kind"].values == batch.features["item_kind"][row]
    assert wanted.any() and bits.shape == (46, 2)
    assert torch.equal(bits[:, 1], wanted.float())


def test_counts_are_those_of_a_loop():
    batch = make_batch(LENGTHS)
    counts = counts_of(batch)
    kinds, times = batch.sequences["buy.kind"].to_list(), batch.sequences["buy.timestamp"].to_list()
    for b in range(4):
        days = [(int(batch.timestamps[b]) - int(t)) / 86_400 for t in times[b]]
        hits = [d for d, kind in zip(days, kinds[b], strict=True) if kind == batch.features["item_kind"][b]]
        plain_and_decayed = [float(len(hits)), *[sum(2 ** (-d / half) for d in hits) for half in DECAYS_DAYS]]
        wanted = [math.log1p(len(days)), *[math.log1p(c) for c in plain_and_decayed]]
        got = [float(counts[b, 0]), *counts[b, 6:].tolist()]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("match", [True, False])
def test_events_that_are_only_counted_count_like_visible_ones(match):
    whole = make_batch(LENGTHS)
    history, parts = whole.sequences["buy.timestamp"], {}
    row = history.row_to_sample
    older = (torch.arange(len(row)) - history.offsets[row]) < 3

    def kept(x, where):
        return Jagged.from_lengths(x.values[where], torch.bincount(row[where], minlength=4), 64)

    for name, x in whole.sequences.items():
        if name.startswith("buy."):
            parts[name] = kept(x, ~older)
    for attribute, feature in matches(BUY, FEATURES):
        same = whole.sequences[f"buy.{attribute.name}"].values == whole.features[feature.name][row]
        parts[f"buy.counted.{attribute.name}.{feature.name}"] = kept(history, older & same)
    number = {"buy.counted": torch.bincount(row[older], minlength=4)}
    split = dataclasses.replace(whole, sequences=whole.sequences | parts, features=whole.features | number)
    assert torch.equal(counts_of(split, match=match), counts_of(whole, match=match))
    assert split.sequences["buy.timestamp"].lengths.tolist() == [2, 0, 37, 0]


def test_counts_are_bitwise_the_same_in_any_batch():
    batch = make_batch(LENGTHS)
    together = counts_of(batch)
    for b in range(4):
        assert torch.equal(counts_of(take(batch, b))[0], together[b])


def test_places_keep_order_over_all_scales_and_survive_extremes():
    x = torch.tensor([-3e38, -1e4, -1.0, -1e-3, 0.0, 1e-3, 0.02, 1.0, 2.0, 1e4, 3e38])
    assert (place(x).diff() > 0).all() and place(x).abs().max() <= 15
    assert place(torch.zeros(())) == 0


def test_hats_interpolate_between_neighbouring_knots():
    weights = hats(torch.tensor([0.25, -15.0, 15.0]), 0.5)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    knots = torch.arange(-30, 31) * 0.5
    torch.testing.assert_close(weights @ knots, torch.tensor([0.25, -15.0, 15.0]))
    assert (weights > 0).sum(1).tolist() == [2, 1, 1]


def test_number_encoding_can_draw_a_step():
    encoding, x = NumberEncoding(1, 4), torch.linspace(0, 8, 400)[:, None]
    target = ((x > 1.4) & (x < 4.0)).float()
    head = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*encoding.parameters(), *head.parameters()], lr=0.05)
    for _ in range(150):
        loss = torch.nn.functional.mse_loss(head(encoding(x)[:, 0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02


def test_event_tokens_keep_the_offsets():
    batch, module = make_batch(LENGTHS), tokenizer()
    view = module.view(batch)
    events = module(batch, embed(batch), view)
    assert isinstance(events, Jagged) and events.values.shape == (46, 16)
    assert events.offsets is view.history.offsets and (view.gap >= 0).all()


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [2, 0, 1, 3], [0, 1, 5, 4, 0, 9]])
def test_taps_are_a_causal_convolution_of_each_sample(lengths, taps):
    """Samples shorter than the taps, empty ones and no samples at all; what lies before a sample weighs nothing."""
    history = Jagged.from_lengths(torch.randn(sum(lengths), taps * 2), torch.tensor(lengths, dtype=torch.int64))
    x = history.values.requires_grad_()
    got = add_taps(x, history.positions, taps)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    wanted, gradient, start = torch.zeros_like(got), torch.zeros_like(x), 0
    for length in lengths:
        for i in range(length):
            for back in range(min(taps, i + 1)):
                columns = slice(2 * back, 2 * back + 2)
                wanted[start + i] += x.detach()[start + i - back, columns]
                gradient[start + i - back, columns] = weight[start + i]
        start += length
    torch.testing.assert_close(got, wanted)
    assert torch.equal(x.grad, gradient)


def test_an_event_sees_as_many_before_it_as_there_are_taps_and_none_of_another_sample():
    batch, module = make_batch(LENGTHS), tokenizer(taps=3)
    embedded = embed(batch)
    events = module(batch, embedded, module.view(batch))
    events.values[5 + 7].sum().backward()  # event 7 of the third sample
    seen = embedded.sequences["buy.product"].values.grad.abs().sum(1).nonzero().flatten()
    assert seen.tolist() == [10, 11, 12]
    other = embed(batch)
    module(batch, other, module.view(batch)).values[6].sum().backward()  # event 1 of the same sample
    assert other.sequences["buy.product"].values.grad.abs().sum(1).nonzero().flatten().tolist() == [5, 6]


def test_one_tap_is_the_event_alone():
    batch, module = make_batch(LENGTHS), tokenizer(taps=3)
    alone, dim = tokenizer(), 16
    alone.outer = module.outer
    with torch.no_grad():
        alone.lift.weight.copy_(module.lift.weight[:dim])
        alone.inner.weight.copy_(module.inner.weight[:dim])
        alone.inner.bias.copy_(module.inner.bias[:dim])
    first = torch.tensor([0, 5, 45])  # the first events of the samples have nothing before them
    a, b = (m(batch, embed(batch), m.view(batch)).values for m in (alone, module))
    torch.testing.assert_close(a[first], b[first])
    assert not torch.allclose(a, b)


def test_feature_tokens_have_the_configured_number():
    batch = make_batch(LENGTHS)
    module = FeatureTokenizer(FEATURES, 11, SMALL, EMBEDDING_DIM)
    tokens, candidate = module(module.vectors(batch, embed(batch), [counts_of(batch)]))
    assert tokens.shape == (4, SMALL.num_feature_tokens, SMALL.dim) and candidate.shape == (4, SMALL.dim)
