"""The schema: it comes back from disk as it was, and every rule names the feature that breaks it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from opengem.data.schema import Baseline, Feature, Label, Schema, Stream
from opengem.errors import UserError
from tests.data.small import SCHEMA


def test_round_trip(tmp_path):
    full = dataclasses.replace(SCHEMA, baselines=(Baseline("trees", "trees", ("hour", "count")),), source="here")
    full.save(tmp_path)
    assert Schema.load(tmp_path) == full


def test_tables_are_shared_by_name():
    assert SCHEMA.tables() == {"item": 50, "tags": 20}
    assert Feature("city", rows=3).table == "city"
    assert [f.name for f in SCHEMA.id_features()] == ["item", "item", "item", "tags"]
    assert SCHEMA.stream("buy").attributes[0].rows == 50


BAD = {
    "empty name": (lambda: Feature("", rows=1), "must be non-empty"),
    "dot": (lambda: Feature("a.b", rows=1), "hold no '.'"),
    "kind": (lambda: Feature("a", "float"), "kind is 'float', wanted one of id, ids, dense, bits"),
    "role": (lambda: Feature("a", rows=1, role="ad"), "role is 'ad', wanted one of user, item, context"),
    "no rows": (lambda: Feature("a"), "kind id needs rows >= 1, got 0"),
    "dense rows": (lambda: Feature("a", "dense", 3), "dense features have no rows"),
    "many bits": (lambda: Feature("a", "bits", 63), "at most 62 actions, got 63"),
    "list in a stream": (lambda: Stream("s", (Feature("a", "ids", 3),)), "cannot be a list"),
    "timestamp": (lambda: Stream("s", (Feature("timestamp", "dense"),)), "'timestamp' is implied"),
    "attribute twice": (lambda: Stream("s", (Feature("a", rows=1), Feature("a", rows=1))), "a stands more than once"),
    "stream name": (lambda: Stream("a.b"), "hold no '.'"),
    "no labels": (lambda: dataclasses.replace(SCHEMA, labels=()), "at least one label"),
    "given": (lambda: dataclasses.replace(SCHEMA, labels=(Label("a", given="b"),)), "given 'b' is no other label"),
    "given itself": (lambda: dataclasses.replace(SCHEMA, labels=(Label("a", given="a"),)), "given 'a' is no other"),
    "split": (lambda: dataclasses.replace(SCHEMA, splits={"train": (5, 3)}), "starts at 5, after its end 3"),
    "baseline kind": (lambda: Baseline("b", "forest", ()), "kind is 'forest', wanted logistic or trees"),
    "baseline feature": (
        lambda: dataclasses.replace(SCHEMA, baselines=(Baseline("b", "logistic", ("item",)),)),
        "['item'] are no dense features",
    ),
    "baseline of trees": (
        lambda: dataclasses.replace(SCHEMA, baselines=(Baseline("b", "trees", ("tags", "lost")),)),
        "['tags', 'lost'] are no dense or id features",
    ),
    "table rows": (
        lambda: dataclasses.replace(SCHEMA, features=(Feature("item", rows=51, table="item"),)),
        "table 'item': feature 'item' has 51 rows, another feature of that table 50",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_broken_rule(case):
    make, words = BAD[case]
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_bad_files(tmp_path):
    good = {"format": 1, **json.loads(json.dumps(dataclasses.asdict(SCHEMA)))}
    cases = {
        "is not valid JSON": "{",
        "wanted a JSON object, got NoneType": "null",
        "format 2, this version reads format 1": json.dumps({**good, "format": 2}),
        "unexpected keyword argument 'colour'": json.dumps({**good, "colour": "red"}),
        "'labels'": json.dumps({k: v for k, v in good.items() if k != "labels"}),
        "unexpected keyword argument 'size'": json.dumps({**good, "features": [{"name": "a", "size": 3}]}),
    }
    for words, text in cases.items():
        (tmp_path / "schema.json").write_text(text)
        with pytest.raises(UserError) as error:
            Schema.load(tmp_path)
        assert words in str(error.value) and "schema.json" in str(error.value) and "\n" not in str(error.value)


def test_missing_folder_and_foreign_folder(tmp_path):
    with pytest.raises(UserError, match="does not exist; make one with `opengem data"):
        Schema.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="use `opengem data import`"):
        Schema.load(tmp_path)
