"""The two towers: each sees its own side alone; the inner product joins one label; where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opengem.data.schema import Feature, Label, first_label
from opengem.model.gem import GEM
from opengem.model.towers import Towers
from tests.model.sample import EMBEDDING_DIM, SCHEMA, SMALL, Jagged, embed, make_batch

LENGTHS = {"buy": [3, 0, 9, 64], "view": [0, 0, 5, 7]}
CONFIG = replace(SMALL, tower_dim=4)
# Of every role and kind.
FEATURES = [
    *SCHEMA.features, Feature("kinds", "ids", rows=6, role="item"), Feature("height", "dense", role="user"),
    Feature("price", "dense", role="item"), Feature("badges", "bits", rows=3, role="item"),
    Feature("habits", "bits", rows=3, role="user"),
]  # fmt: skip
USER = {"user", "hour", "tags", "height", "habits", "buy", "view"}
ITEM = {"item", "item_kind", "kinds", "price", "badges"}
NEITHER = {"age", "flags", "counts"}


def inputs() -> tuple:
    """A GEM, and (vectors of the features, embedded): leaves that the towers read."""
    torch.manual_seed(1)
    schema = replace(SCHEMA, features=tuple(FEATURES))
    gem, batch = GEM(schema, FEATURES, CONFIG, EMBEDDING_DIM), make_batch(LENGTHS)
    kinds = Jagged.from_list([[1, 2], [], [0], [5]], torch.int64)
    more = {"height": torch.rand(4), "price": torch.rand(4), "badges": torch.arange(4), "habits": torch.arange(4)}
    batch = replace(batch, features=batch.features | {"kinds": kinds} | more)
    embedded = embed(batch)
    embedded.features["kinds"] = torch.randn(4, EMBEDDING_DIM, requires_grad=True)
    _, counts = gem.tokenize_events(batch, embedded)
    return gem, gem.features.vectors(batch, embedded, counts).detach().requires_grad_(), embedded


@pytest.mark.parametrize("side, wanted", [(0, USER), (1, ITEM)])
def test_a_tower_sees_all_of_its_own_side_and_nothing_else(side, wanted):
    """Match counts, and numbers and bits of the context, which may describe the pair, reach neither."""
    gem, vectors, embedded = inputs()
    gem.towers(vectors, embedded)[side].square().sum().backward()
    places = {f.name: gem.features.places([f]) for f in FEATURES}
    places["counts"] = sorted(set(range(vectors.shape[1])) - {p for found in places.values() for p in found})
    assert len(places["counts"]) == gem.features.num_counts > 0
    seen = {name for name, at in places.items() if vectors.grad is not None and vectors.grad[:, at].any()}
    if side == 0:
        for name, history in embedded.sequences.items():
            assert (history.values.grad.abs().sum(1) > 0).all(), name
        seen |= {"buy", "view"}
    else:
        assert all(history.values.grad is None for history in embedded.sequences.values())
    assert seen == wanted
    assert set(places) | {"buy", "view"} == USER | ITEM | NEITHER


def test_a_history_is_its_sum_over_the_root_of_its_length():
    gem, vectors, embedded = inputs()
    seen = []
    gem.towers.user_tower.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    gem.towers(vectors, embedded)
    width = EMBEDDING_DIM * len(gem.towers.histories)
    for column, name in zip(seen[0][:, -width:].split(EMBEDDING_DIM, 1), gem.towers.histories, strict=True):
        for row, events in zip(column, embedded.sequences[name].to_list(), strict=True):
            torch.testing.assert_close(row, events.sum(0) / max(1, len(events)) ** 0.5)


def test_the_inner_product_joins_the_first_label_without_given_alone():
    torch.manual_seed(1)
    labels = (Label("convert", given="click"), Label("click"), Label("like"))
    assert first_label(labels).name == "click"
    gem, batch = GEM(replace(SCHEMA, labels=labels), list(SCHEMA.features), CONFIG, EMBEDDING_DIM), make_batch(LENGTHS)
    whole = gem(batch, embed(batch))
    user, item = whole.towers
    assert user.shape == item.shape == (4, 4) and user.dtype == item.dtype == torch.float32
    gem.towers = None
    bare = gem(batch, embed(batch))
    assert bare.towers is None
    torch.testing.assert_close(whole["click"], bare["click"] + (user * item).sum(1))
    assert torch.equal(whole["convert"], bare["convert"]) and torch.equal(whole["like"], bare["like"])


@pytest.mark.parametrize("role, streams", [("item", 2), ("user", 0)])
def test_a_data_set_without_one_side_has_no_towers(role, streams):
    """A history alone makes a user; nothing but its features makes a candidate."""
    features = [f for f in SCHEMA.features if f.role != role and (role == "item" or f.role != "context")]
    schema = replace(SCHEMA, features=tuple(features), streams=SCHEMA.streams[:streams])
    assert GEM(schema, features, CONFIG, EMBEDDING_DIM).towers is None
    if role == "user":
        assert GEM(replace(schema, streams=SCHEMA.streams), features, CONFIG, EMBEDDING_DIM).towers is not None
    gem = GEM(schema, features, SMALL, EMBEDDING_DIM)
    with pytest.raises(ValueError, match="the user or the candidate has no feature"):
        Towers(gem.features, features, schema.streams, 4, EMBEDDING_DIM)
