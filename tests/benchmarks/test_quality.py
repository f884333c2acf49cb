"""Rows name what their run changed in the recipe, and a run writes a row of each mode and task."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.quality import Arguments, _config, _name, changed, main
from opengem.cli import load_recipe
from opengem.config import to_json
from opengem.errors import UserError
from tests import small


def test_fields_are_changed_and_named(tmp_path):
    given = ("optim.lr=0.002", "optim.betas=[0.9, 0.99]")
    arguments = Arguments(tmp_path, tmp_path / "rows.jsonl", history=64, set=given)
    config, recipe = _config(arguments, "all", 3), load_recipe("small")
    assert config.optim == replace(recipe.optim, lr=0.002, betas=(0.9, 0.99))
    (stream,), (whole,) = config.model.streams, recipe.model.streams
    assert stream == replace(whole, max_length=64, counted=whole.max_length + whole.counted - 64)
    assert (config.data.optional_features, config.train.seed) == (("*",), 3)
    chosen = {name: _config(arguments, name, 0).data.optional_features for name in ("none", "all", "user_*,history")}
    assert chosen == {"none": (), "all": ("*",), "user_*,history": ("user_*", "history")}
    assert _name(arguments, "all") == "small, all optional features, histories of 64, " + ", ".join(given)


@pytest.mark.parametrize("text", ["optim.lrr=1", "optm.lr=1", "optim.lr", "optim.lr=fast", "name.x=1", "optim.lr=-1"])
def test_a_field_that_does_not_exist_or_fit_is_one_error(text):
    with pytest.raises(UserError, match="set|optim"):
        changed(load_recipe("small"), (text,))


def test_a_run_writes_a_row_of_each_mode_and_task(tmp_path, capsys):
    recipe, out = tmp_path / "small.json", tmp_path / "rows.jsonl"
    recipe.write_text(to_json(small.config(steps=4)))
    main(Arguments(small.write(tmp_path / "data"), out, str(recipe), seeds=(1,), features=("all",), history=8))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["mode"], row["task"]) for row in rows] == [
        (mode, task) for mode in ("strict", "progressive") for task in ("click", "convert")]
    assert {row["impl"] for row in rows} == {f"{recipe}, all optional features, histories of 8"}
    assert "progressive" in capsys.readouterr().out
