"""The run folder: one writer at a time, a full disk in one line, curves without a seam after a resume."""

from __future__ import annotations

import io
import json
from unittest.mock import Mock

import pytest
from rich.console import Console

from opengem.errors import UserError
from opengem.runlog import RunLog, read_metrics


def _open(folder, step=0, progress=False):
    return RunLog(folder, "{}", step, 10, progress)


def _line(step):
    task = {"click": {"ne": 0.5, "logloss": 0.3, "calibration": None}}
    sums = {"samples": 100 * step, "tokens": 900 * step, "useful_tflop": step}
    return {"step": step, "tasks": task, "tasks_total": task} | sums


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path):
    with _open(tmp_path / "run"), pytest.raises(UserError, match="another process"):
        _open(tmp_path / "run")
    with _open(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"cannot be written.*--out"):
            _open(out)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with _open(tmp_path / "run") as log:
        log.write(_line(1))
        monkeypatch.setattr("os.replace", full)
        with pytest.raises(UserError, match="No space left"):
            log.finish({"ne": 1.0})
        monkeypatch.setattr(log, "_file", type("Full", (io.StringIO,), {"write": full})())
        with pytest.raises(UserError, match="No space left"):
            log.write(_line(2))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
    assert not list((tmp_path / "run").glob(".*"))


def test_config_json_is_not_written_again_on_resume(tmp_path):
    """A disk that is full at that moment would cost the run its config."""
    with _open(tmp_path):
        pass
    (tmp_path / "config.json").write_text("{  }")
    with _open(tmp_path):
        assert (tmp_path / "config.json").read_text() == "{  }"


def test_curves_have_no_seam_after_a_resume(tmp_path):
    """TensorBoard lost the point of the checkpoint's own step, or kept the dropped ones."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2, 0):
        with _open(tmp_path, start) as log:
            for step in range(start + 1, 5):
                log.write(_line(step))
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [point.step for point in events.Scalars("tasks/click/ne")] == [1, 2, 3, 4]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(_line(1)) + "\n{oh\n" + '{"step": ')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: .*wanted JSON"):
        read_metrics(tmp_path)


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(_line(1)) + "\n" + '{"step": ')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("width", [80, 200])
def test_the_progress_line_shows_everything_on_any_screen(tmp_path, width):
    """On 80 columns steps, memory and time left were cut away."""
    screen = Console(width=width, file=io.StringIO(), record=True)
    with _open(tmp_path, progress=True) as log:
        for step in (1, 2, 3):
            log.write(_line(step))
        screen.print(log._bar.get_renderable())
    shown = " ".join(screen.export_text().split())
    for part in ("3/10", "samples/s", "click NE 0.5000", "GiB", "left"):
        assert part in shown, shown
    assert "…" not in shown


def test_throughput_is_that_of_the_run_also_when_it_is_started_again(tmp_path):
    """A finished run that was started once more lost the speed in its summary."""
    with _open(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(_line(step))
        speed = log.throughput()
    with _open(tmp_path, 3) as log:
        assert log.throughput() == speed
    assert speed["tokens_per_s"] == pytest.approx(9 * speed["samples_per_s"])


def test_speed_leaves_the_warm_up_out(tmp_path, monkeypatch):
    clock = iter([0.0, 50.0, 51.0, 53.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with _open(tmp_path) as log:
        monkeypatch.setattr(log, "_bar", Mock())
        assert log.throughput() == dict.fromkeys(("samples_per_s", "tokens_per_s", "useful_tflops"))
        for step in (1, 2, 4):
            log.write(_line(step))
        assert log.throughput() == pytest.approx({"samples_per_s": 100.0, "tokens_per_s": 900.0, "useful_tflops": 1.0})
    assert [line["samples_per_s"] for line in read_metrics(tmp_path)] == [None, 100.0, 100.0]
    assert [line["elapsed_s"] for line in read_metrics(tmp_path)] == [50.0, 1.0, 2.0]
