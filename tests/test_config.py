"""Config rules name the field, the value, the rule and the fix, also when the feature is off; JSON round-trips."""

from __future__ import annotations

import pytest

from opengem.config import Config, DataConfig, ModelConfig, OptimConfig, StreamConfig, TrainConfig, from_json, to_json
from opengem.errors import UserError


def test_json_round_trip_rebuilds_the_same_config():
    config = Config(
        name="x",
        data=DataConfig(batch_size=7, optional_features=("a", "b")),
        model=ModelConfig(streams=(StreamConfig("clicks", heads=4), StreamConfig())),
        optim=OptimConfig(task_weights={"click": 2.0}),
    )
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (lambda: DataConfig(batch_size=0), ["data.batch_size", "0", "at least 1"]),
        (lambda: ModelConfig(schedule="GX"), ["model.schedule", "'GX'", "G, S, F"]),
        (lambda: ModelConfig(schedule="SG"), ["model.schedule", "'SG'", "the first G or F"]),
        (lambda: ModelConfig(activation="gelo"), ["model.activation", "'gelo'", "gelu"]),
        (lambda: StreamConfig(attention="blok"), ["attention", "'blok'", "block"]),
        (lambda: StreamConfig(dim=0), ["model.streams[*].dim", "0", "at least 1"]),
        (lambda: StreamConfig(taps=0), ["model.streams[*].taps", "0", "at least 1"]),
        (lambda: StreamConfig(dim=30, heads=4), ["dim", "30", "heads (4)", "128"]),
        (lambda: ModelConfig(tower_dim=-1), ["model.tower_dim", "-1", "at least 0", "--model.tower-dim 0"]),
        (lambda: OptimConfig(in_batch_softmax=-0.5), ["optim.in_batch_softmax", "-0.5", "at least 0"]),
        # the time scale is checked although the time encoding is off
        (lambda: ModelConfig(time_encoding=False, time_scale_s=0.0), ["model.time_scale_s", "0.0", "above 0"]),
        (lambda: OptimConfig(betas=(1.0, 0.9)), ["optim.betas", "[0, 1)"]),
        (lambda: OptimConfig(task_weights={"click": -1.0}), ["optim.task_weights[click]", "-1.0"]),
        (lambda: TrainConfig(device="tpu"), ["train.device", "'tpu'", "cpu"]),
        (lambda: ModelConfig(streams=(StreamConfig(), StreamConfig())), ["model.streams", "twice"]),
    ],
)
def test_a_broken_rule_names_field_value_rule_and_fix(make, pieces):
    with pytest.raises(UserError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for piece in pieces:
        assert piece in message, message


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"modle": {}}', ["modle", "no such field", "model"]),
        ('{"model": {"dim": "big"}}', ["config.model.dim", "'big'", "int"]),
        ('{"model": {"streams": [{"heads": 2.5}]}}', ["config.model.streams[0].heads", "2.5", "int"]),
        ('{"train": {"compile": 1}}', ["config.train.compile", "1", "bool"]),
        ('{"optim": {"betas": [0.9]}}', ["config.optim.betas"]),
        ("{", ["not valid JSON"]),
        ("[]", ["wanted an object"]),
    ],
)
def test_json_errors_name_the_field(text, pieces):
    with pytest.raises(UserError) as caught:
        from_json(text)
    for piece in pieces:
        assert piece in str(caught.value)
