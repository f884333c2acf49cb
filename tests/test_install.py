"""What an installation needs, and what it does without: no torch to build, no triton to run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from opengem.data.synthetic import build

ROOT = Path(__file__).resolve().parent.parent


def run_without(module: str, code: str, cwd: Path) -> None:
    """Run `code` in a new interpreter in which importing `module` fails."""
    blocked = f"import sys; sys.modules[{module!r}] = None; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wheel_is_built_without_torch_and_runs_anywhere(tmp_path):
    """A build that imports torch fails in the clean environment in which pip builds."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("opengem", "recipes", "benchmarks", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run_without("torch", f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})", source)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in ("opengem/cli.py", "opengem/kernels/jfa/triton.py", "recipes/tiny.py", "benchmarks/run.py"):
        assert needed in names


def test_tiny_trains_evaluates_and_predicts_where_triton_is_missing(tmp_path):
    """macOS and Windows have no triton; every op then takes its plain implementation."""
    build(tmp_path / "data", users=100, samples=1500, seed=1)
    run_without("triton", (
        "from opengem.cli import main\n"
        "main(['train', 'tiny', '--data', 'data', '--out', 'run', '--train.steps', '2', '--no-baselines'])\n"
        "main(['evaluate', 'run', '--data', 'data'])\n"
        "main(['predict', 'run', '--data', 'data', '--out', 'scores.parquet'])\n"
        "main(['doctor'])\n"
    ), tmp_path)
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "scores.parquet").is_file()
