"""A checkpoint is complete or ignored; a full disk leaves the earlier ones usable."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opengem import checkpoint
from opengem.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def _state(value: float) -> dict:
    return {"weights": {"a": torch.full((4, 3), value)}, "progress": {"json": f"at {value}"}}


def test_round_trip_keeps_tensors_and_text(tmp_path):
    checkpoint.save(tmp_path, 7, _state(2.5), keep=2)
    state = _state(0.0)
    checkpoint.load(checkpoint.find(tmp_path), state)
    assert torch.equal(state["weights"]["a"], torch.full((4, 3), 2.5))
    assert state["progress"]["json"] == "at 2.5"


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, _state(step), keep=2)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000000002", "step-000000010"]


def test_a_save_that_was_killed_is_passed_over_and_said_so(tmp_path, capsys):
    checkpoint.save(tmp_path, 1, _state(1.0), keep=5)
    newest = checkpoint.save(tmp_path, 2, _state(2.0), keep=5)
    (newest / checkpoint.MARKER).unlink()  # killed after the shard file, before the marker
    assert checkpoint.find(tmp_path).name == "step-000000001"
    assert "step-000000002 is incomplete" in capsys.readouterr().out
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.load(newest, _state(0.0))


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.find(tmp_path / "nothing") is None


def test_a_checkpoint_of_another_shape_is_a_clear_error(tmp_path):
    checkpoint.save(tmp_path, 1, _state(1.0), keep=1)
    other = {"weights": {"b": torch.zeros(2)}, "progress": {"json": ""}}
    with pytest.raises(UserError, match="cannot be loaded: Missing key.*config and the data set") as caught:
        checkpoint.load(checkpoint.find(tmp_path), other)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_checkpoint_is_one_line_with_one_cause(tmp_path, damage, capfd):
    saved = checkpoint.save(tmp_path, 1, _state(1.0), keep=1)
    for file in saved.glob("*.distcp" if damage is not None else ".metadata"):
        file.unlink() if damage is None else file.write_bytes(damage * 100)
    with pytest.raises(UserError, match="cannot be loaded.*remove it if it is damaged") as caught:
        checkpoint.load(saved, _state(0.0))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_an_interrupt_while_saving_is_an_interrupt(tmp_path, monkeypatch):
    """The checkpoint library wraps it in an exception of its own, which was reported as a full disk."""
    from torch.distributed.checkpoint import FileSystemWriter

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    checkpoint.save(tmp_path, 1, _state(1.0), keep=2)
    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, _state(2.0), keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a file-size limit to stand for a full disk")
def test_a_full_disk_is_one_line_and_keeps_the_previous_checkpoint(tmp_path):
    """The file-size limit makes the write fail half way, as a full disk does."""
    code = f"""
import resource, sys, torch
from pathlib import Path
from opengem import checkpoint
from opengem.errors import UserError
folder = Path({str(tmp_path)!r})
checkpoint.save(folder, 1, {{"a": torch.ones(4)}}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, 2, {{"a": torch.ones(1_000_000)}}, keep=1)
except UserError as error:
    print(error)
state = {{"a": torch.zeros(4)}}
checkpoint.load(checkpoint.find(folder), state)
print(checkpoint.find(folder).name, state["a"].tolist(), sorted(p.name for p in folder.iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    message, after = done.stdout.strip().splitlines()
    assert "step 2 could not be written" in message
    assert "free some space" in message
    assert after == "step-000000001 [1.0, 1.0, 1.0, 1.0] ['step-000000001']"
