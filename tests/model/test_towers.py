"""The two towers: each sees the ids of its own side alone; they go with the logits in training and change none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opengem.data.schema import Feature
from opengem.model.gem import GEM
from opengem.model.towers import Towers, identities, sides
from tests.model.sample import EMBEDDING_DIM, FEATURES, SCHEMA, SMALL, embed, make_batch

CONFIG = replace(SMALL, tower_dim=4)


def test_a_tower_sees_the_ids_of_its_own_side_and_nothing_else():
    """Numbers and bits of the context may describe the pair, as match counts do, and reach neither."""
    assert sides(FEATURES) == (["user", "hour", "tags"], ["item", "item_kind"])
    batch = make_batch({"buy": [3, 0, 9, 64], "view": [0, 0, 5, 7]})
    for side, names in enumerate(sides(FEATURES)):
        torch.manual_seed(1)
        embedded = embed(batch)
        Towers(FEATURES, 4, EMBEDDING_DIM)(embedded)[side].square().sum().backward()
        assert {name for name, x in embedded.features.items() if x.grad is not None} == set(names)
        assert all(embedded.features[name].grad.abs().sum() > 0 for name in names)


def test_towers_come_with_the_logits_in_training_and_change_none():
    torch.manual_seed(1)
    gem, batch = GEM(SCHEMA, FEATURES, CONFIG, EMBEDDING_DIM), make_batch({"buy": [3, 0], "view": [0, 5]})
    trained, served = gem(batch, embed(batch)), gem.eval()(batch, embed(batch))
    assert served.towers is None and all(torch.equal(trained[name], served[name]) for name in served)
    user, item = trained.towers
    assert user.shape == item.shape == (2, 4) and user.dtype == item.dtype == torch.float32


@pytest.mark.parametrize("role", ["item", "user"])
def test_a_data_set_without_ids_of_one_side_has_no_towers(role):
    gone = ("user", "context") if role == "user" else ("item",)
    features = [f for f in FEATURES if f.role not in gone or f.kind == "dense"]
    assert GEM(SCHEMA, FEATURES, CONFIG, EMBEDDING_DIM).towers is not None
    assert GEM(SCHEMA, features, CONFIG, EMBEDDING_DIM).towers is None


def test_an_offer_makes_no_other_candidate():
    offer = Feature("mailer", rows=3, role="item", optional=True)
    assert [f.name for f in identities([*FEATURES, offer])] == ["item", "item_kind", "user"]
