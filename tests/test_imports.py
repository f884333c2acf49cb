"""The layers of the package: a module imports only lower ones, and `import opengem` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVELS = [
    {"errors", "jagged", "mesh", "config"},
    {"data", "kernels", "loss", "metrics"},
    {"sparse", "model", "precision"},
    {"parallel", "memory", "optim"},
    {"checkpoint", "efficiency"},
    {"job", "runlog", "baselines", "train", "evaluate", "profiling"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# report reads what a run left behind, so it knows the run log's reader
ALLOWED_UPWARD = {("efficiency/report.py", "runlog")}


def _modules() -> list[Path]:
    return sorted((ROOT / "opengem").rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Full dotted names of the project modules a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _part(path: Path) -> str:
    """The top-level part of the package a file belongs to; "" for the package's own __init__."""
    relative = path.relative_to(ROOT / "opengem")
    return relative.parts[0].removesuffix(".py") if relative.name != "__init__.py" or len(relative.parts) > 1 else ""


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_its_own_or_lower_levels(path):
    part = _part(path)
    if not part:
        return
    assert part in LEVEL, f"{part} has no level; add it to LEVELS"
    for name in _imports(path):
        pieces = name.split(".")
        if pieces[0] in ("recipes", "benchmarks"):
            assert part == "cli", f"{path} imports {name}"
        if pieces[0] != "opengem" or len(pieces) < 2 or pieces[1] == "__version__":
            continue
        target = pieces[1]
        if (str(path.relative_to(ROOT / "opengem")), target) in ALLOWED_UPWARD:
            continue
        assert LEVEL[target] <= LEVEL[part], f"{path} (level of {part}) imports {name} from a higher level"


@pytest.mark.parametrize("folder", ["model", "kernels"])
def test_model_and_kernels_know_neither_sparse_nor_torch_distributed(folder):
    for path in (ROOT / "opengem" / folder).rglob("*.py"):
        for name in _imports(path):
            assert not name.startswith(("torch.distributed", "opengem.sparse")), f"{path} imports {name}"


def test_importing_the_package_is_quick_and_loads_nothing_heavy():
    code = "import sys, opengem; print([m for m in ('torch', 'triton', 'pyarrow') if m in sys.modules])"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
    assert time.perf_counter() - start < 2.0


def test_jagged_loads_neither_triton_nor_pyarrow():
    code = "import sys; from opengem import Jagged; print([m for m in ('triton', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_sizes_promised_by_the_design():
    total = 0
    for path in _modules():
        lines = path.read_text().splitlines()
        kernel = "kernels" in path.parts
        total += 0 if kernel else len(lines)
        assert len(lines) <= (800 if kernel else 500), f"{path} has {len(lines)} lines"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                size = node.end_lineno - node.lineno + 1
                assert size <= (150 if kernel else 60), f"{path}:{node.lineno} {node.name} has {size} lines"
    assert total <= 15_000, f"{total} lines outside kernels/"
