"""The report is one self-contained page, also for a run that has not finished."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opengem.config import Config, to_json
from opengem.efficiency import doctor, report
from opengem.errors import UserError


def _run(folder, finished=True):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(Config(name="<b>odd & name</b>")))
    task = {"ne": 0.9, "logloss": 0.4, "calibration": 1.0}
    lines = [
        {
            "step": s, "samples": 100 * s, "tokens": 900 * s, "loss": 0.7 - s / 100, "padding_avoided": 0.4,
            "samples_per_s": None if s == 1 else 500.0, "memory_bytes": 2**30, "tasks": {"click": task},
            "tasks_total": {"click": task},
        }
        for s in range(1, 6)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        final = {"ne": 0.85, "auc": None, "logloss": 0.4, "calibration": 1.01, "rows": 50}
        curve = [
            {"predicted": 0.1, "observed": 0.12, "weight": 25.0},
            {"predicted": 0.3, "observed": 0.28, "weight": 25.0},
        ]
        summary = {
            "steps": 5, "samples_per_s": 500.0, "splits": {"test": {"click": final | {"calibration_curve": curve}}},
            "baselines": {"trees_6": {"test": {"click": final}}}, "lengths": {"view.timestamp": [3, 0, 2, 5]},
            "environment": {"torch": "x"},
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("finished", [True, False])
def test_the_page_needs_nothing_from_outside(tmp_path, finished):
    page = report.write([_run(tmp_path / "a", finished)]).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)""", page)
    assert "<script" not in page
    assert "@import" not in page
    assert "&lt;b&gt;odd &amp; name" in page
    assert page.count("<svg") >= 3
    assert ("trees_6" in page) == finished
    assert ("not finished" in page) != finished
    assert "undefined" not in page


def test_padding_waste_is_stated(tmp_path):
    page = report.write([_run(tmp_path / "a")]).read_text()
    assert f"padding would waste {1 - (2 * 2 + 3 * 5) / (10 * 3):.0%}" in page


def test_two_runs_are_compared_on_one_page(tmp_path):
    out = report.write([_run(tmp_path / "a"), _run(tmp_path / "b")], tmp_path / "compare.html")
    page = out.read_text()
    assert "(a)" in page
    assert "(b)" in page


def test_tasks_of_every_run_are_drawn_however_many_runs(tmp_path):
    """Only the first run's tasks were drawn, and only as many runs as there are colours."""
    runs = [_run(tmp_path / f"run{i}") for i in range(8)]
    metrics = runs[7] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"click"', '"buy"'))
    page = report.write(runs).read_text()
    assert "Progressive NE, click" in page
    assert "Progressive NE, buy" in page
    loss = page[: page.index("<figcaption>Loss")].rsplit("<figure>", 1)[1]
    assert all(f"(run{i})" in loss for i in range(8))
    assert "trees_6 (run7)" in page


def test_ids_are_unique(tmp_path):
    ids = re.findall(r'\bid="([^"]*)"', report.write([_run(tmp_path / "a")]).read_text())
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
def test_a_damaged_file_is_named(tmp_path, name):
    (_run(tmp_path / "a") / name).write_text("{oh\n")
    with pytest.raises(UserError, match=f"{name}.*wanted JSON"):
        report.write([tmp_path / "a"])


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        report.write([_run(tmp_path / "a")], tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        report.write([tmp_path])


def test_doctor_names_versions_and_what_is_missing(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "obp" else real(name, *a))
    text = doctor.text()
    assert re.search(r"torch\s+\d", text)
    assert "obp" in text
    assert "pip install 'opengem[data]'" in text
    assert "cpu:" in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(tmp_path, width):
    """On a phone and on a desk: in a frame of that width, since no browser window is as narrow as a phone."""
    _run(tmp_path / "run")
    shutil.copy(Path(__file__).parent / "profile.json", tmp_path / "run" / "profile.json")
    inner = html.escape(report.write([tmp_path / "run"]).read_text())
    measure = "document.body.dataset.width = this.contentDocument.documentElement.scrollWidth"
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{inner}" onload="{measure}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}</body>")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
               "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}/browser",
               "--window-size=1400,1000", "--dump-dom", (tmp_path / "frame.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "CONSOLE" not in done.stderr
    assert 300 < int(re.search(r'data-width="(\d+)"', done.stdout)[1]) <= width


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("profile.json", "3"), ("profile.json", '{"rows": []}'), ("profile.json", "\udcff"), ("summary.json", "[]"),
        ("metrics.jsonl", "{}\n"), ("config.json", "null"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_in_a_run_folder_is_one_line(tmp_path, name, text):
    run = _run(tmp_path / "a")
    (run / name).write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=f"{name}.*wanted.*JSON.*restore the file") as caught:
        report.write([run])
    assert "\n" not in str(caught.value)
