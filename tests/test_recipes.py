"""The recipes against the ladder they claim: sizes, FLOPs, and a config that survives its own JSON."""

from __future__ import annotations

import pytest
import torch

from opengem.config import from_json, to_json
from opengem.data.schema import Feature, Label, Schema, Stream
from opengem.model.gem import GEM
from recipes import large, medium, small, tiny

# recipe, mean lengths of its streams, GFLOP of a forward pass, dense parameters
LADDER = {
    "small": (small.recipe, [512, 256], 2.5, 60e6),
    "medium": (medium.recipe, [2048, 1024, 512], 90, 1.5e9),
    "large": (large.recipe, [4096, 2048, 1024, 512], 763, 6.9e9),
}


def ladder_schema(streams: int, features: int) -> Schema:
    """Streams of three id attributes, two labels, as the ladder was counted."""
    attributes = tuple(Feature(f"a{i}", rows=10, table=f"t{i}") for i in range(3))
    inputs = tuple(
        Feature(f"f{i}", rows=10, table=f"t{i}", role="item" if i < 3 else "context") for i in range(features)
    )
    labels = (Label("click"), Label("convert", given="click"))
    sources = tuple(Stream(f"s{i}", attributes) for i in range(streams))
    return Schema("ladder", sources, inputs, labels, {"train": (0, 1)})


def on_meta(config, schema: Schema) -> GEM:
    with torch.device("meta"):
        return GEM(schema, list(schema.features), config.model, config.sparse.dim)


def added(gem: GEM) -> int:
    """Parameters of the heads over the features as they come in, and of the towers."""
    parts = [gem.feature_heads] + ([gem.towers] if gem.towers is not None else [])
    return sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("recipe", [tiny.recipe, small.recipe, medium.recipe, large.recipe])
def test_recipe_prints_json_that_makes_it_again(recipe):
    config = recipe()
    assert recipe.__module__ == f"recipes.{config.name}"
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("name", LADDER)
def test_size_is_that_of_the_ladder(name):
    """The ladder counts neither attention to earlier layers nor the last pooling, hence the room above; second heads
    and towers, which it does not know of, are counted apart."""
    recipe, lengths, gflop, parameters = LADDER[name]
    config = recipe()
    gem = on_meta(config, ladder_schema(len(lengths), config.model.num_feature_tokens))
    flops = sum(gem.flops({f"s{i}": [n] for i, n in enumerate(lengths)}).values())
    assert 1.0 < flops / (gflop * 1e9) < 1.25
    assert 0.95 < (gem.num_parameters() - added(gem)) / parameters < 1.2
    assert added(gem) / parameters < 0.15


def test_tiny_is_tiny():
    config = tiny.recipe()
    gem = on_meta(config, ladder_schema(1, 16))
    assert gem.num_parameters() < 1.2e6
    assert sum(gem.flops({"s0": [64]}).values()) < 10e6
