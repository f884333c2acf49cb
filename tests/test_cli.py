"""The command line: exit status, one-line errors, nearest names, and a config that re-runs the job."""

from __future__ import annotations

import json

import pytest

from opengem import cli
from opengem.config import from_json
from tests import small


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        cli.main(list(arguments))
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("small") / "data")


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["trian", "tiny"], ["no command 'trian'", "train"]),
        (["train"], ["needs a recipe"]),
        (["train", "tinny"], ["no recipe 'tinny'", "tiny"]),
        (["train", "tiny", "--model.dimm", "3"], ["--model.dimm", "--model.dim"]),
        (["train", "tiny", "--model.schedule", "XY"], ["model.schedule", "G, S, F"]),
        (["train", "tiny", "--out", "x"], ["--data"]),
        (["train", "missing.json"], ["missing.json", "does not exist"]),
        (["train", "tiny", "--data", "/no/such", "--out", "x"], ["/no/such", "does not exist"]),
        (["evaluate", "/no/run", "--data", "/no/such"], ["/no/run", "no run folder"]),
        (["report", "/no/run"], ["/no/run", "no run folder"]),
        (["data", "syntetic", "--out", "x"], ["syntetic", "synthetic"]),
        (["bench", "kernels", "--op", "nonsense"], ["bench"]),
        (["bench", "sparse", "--case", "nonsense"], ["bench sparse"]),
        (["bench", "train", "--case", "nonsense"], ["bench train"]),
        (["profile", "tiny", "--out", __file__], ["profile: --out", "is a file"]),
        (["profile", "tiny", "--data", "x", "--streams", "2"], ["--streams", "--data"]),
        (["bench", "kernels", "--ladder"], ["bench kernels has no --ladder", "bench train"]),
        (["bench", "train", "--peers"], ["bench train has no --peers"]),
        (["profile", "tiny", "--samples", "-1"], ["profile: --samples", "-1"]),
        (["train", "tiny", "--no-train.progress"], ["--no-train.progress", "did you mean --train.no-progress?"]),
        (["train", "tiny", "--train.progress", "False"], ["'False'", "--x.no-y"]),
        (["doctor", "now"], ["'now'"]),
        (["train", "tiny", "--train.seed", "-1"], ["train.seed = -1", "2^63"]),
        (["train", "tiny", "--train.dtype", "fp8"], ["train.dtype = 'fp8'", "bfloat16"]),
        (["train", "tiny", "--optim.lr", "abc"], ["--optim.lr", "'abc'"]),
        (["train", "tiny", "extra"], ["'extra'"]),
        (["predict", "/no/run"], ["--data", "--out"]),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, arguments, pieces):
    status, _, err = _run(capsys, *arguments)
    assert status == 2
    assert err.count("\n") == 1, err
    assert "----" not in err and "Error parsing config" not in err and "Value error" not in err
    assert len(err) < 400, err
    for piece in pieces:
        assert piece in err, err


@pytest.mark.parametrize("arguments", [["predict", "r", "--data", "d", "--out", "f"], ["profile", "tiny"]])
def test_what_wants_one_process_is_refused_under_torchrun(capsys, monkeypatch, arguments):
    """`profile` measured every process by itself and printed as many tables."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = _run(capsys, *arguments)
    assert status == 2 and "without torchrun" in err


def test_an_interrupt_is_one_line_and_status_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert _run(capsys, "doctor") == (130, "", "opengem: interrupted\n")


def test_help_and_version(capsys):
    assert "usage: opengem" in _run(capsys, "--help")[1]
    assert "usage: opengem" in _run(capsys)[1]
    assert _run(capsys, "--version")[1].strip()


def test_every_flag_is_in_the_help(capsys):
    status, out, _ = _run(capsys, "train", "tiny", "--help")
    assert status == 0
    for flag in ("--data.batch-size", "--sparse.dim", "--model.schedule", "--optim.lr", "--train.seed", "--resume"):
        assert flag in out


def test_a_recipe_file_that_is_no_text_is_one_line(capsys, tmp_path):
    (tmp_path / "mine.json").write_bytes(b"\xff\xfe{")
    status, _, err = _run(capsys, "train", str(tmp_path / "mine.json"), "--print-config")
    assert (status, err.count("\n")) == (2, 1)
    assert "not valid JSON" in err


def test_the_printed_config_is_a_recipe(capsys, tmp_path):
    _, out, _ = _run(capsys, "train", "tiny", "--print-config", "--model.dim", "32", "--train.seed", "5")
    config = from_json(out)
    assert (config.model.dim, config.train.seed) == (32, 5)
    path = tmp_path / "mine.json"
    path.write_text(out)
    assert from_json(_run(capsys, "train", str(path), "--print-config")[1]) == config


def test_train_evaluate_predict_report(capsys, data, tmp_path):
    from opengem.config import to_json

    recipe, run = tmp_path / "small.json", tmp_path / "run"
    recipe.write_text(to_json(small.config(steps=6)))
    status, out, err = _run(capsys, "train", str(recipe), "--data", str(data), "--out", str(run))
    assert status == 0, err
    assert "dense parameters" in out
    assert "GFLOP" in out
    assert (run / "report.html").is_file()
    status, out, err = _run(capsys, "evaluate", str(run), "--data", str(data))
    assert status == 0, err
    summary = json.loads((run / "summary.json").read_text())
    assert f"{summary['splits']['test']['click']['ne']:.4f}" in out
    status, out, _ = _run(capsys, "predict", str(run), "--data", str(data), "--out", str(tmp_path / "p.parquet"))
    assert status == 0
    assert "60 predictions" in out
    assert _run(capsys, "evaluate", str(run), "--data", str(data), "--split", "tset")[0] == 2
    assert _run(capsys, "doctor")[0] == 0


def test_a_non_finite_loss_is_status_3(capsys, data, tmp_path, monkeypatch):
    from opengem.config import to_json
    from opengem.job import Job

    original = Job.loss
    monkeypatch.setattr(Job, "loss", lambda self, logits, batch: original(self, logits, batch) * float("nan"))
    recipe = tmp_path / "small.json"
    recipe.write_text(to_json(small.config(steps=3)))
    status, _, err = _run(capsys, "train", str(recipe), "--data", str(data), "--out", str(tmp_path / "run"))
    assert status == 3
    assert "step 1" in err
