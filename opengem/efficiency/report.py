"""One self-contained HTML page about a run, or several runs compared: no network, no scripts, plots as inline SVG."""

from __future__ import annotations

import html
import json
from functools import reduce
from itertools import cycle
from pathlib import Path

from opengem.data.files import writable
from opengem.efficiency import drawing, profile_page
from opengem.efficiency.page import document, number, table, tiles
from opengem.errors import UserError
from opengem.runlog import parse, read_metrics, write_whole


def write(runs: list[Path], out: Path | None = None) -> Path:
    """Write the page for `runs` (default file: `report.html` in the first run folder); returns its path.

    A run that has not finished gets curves but no final figures. Raises UserError for a folder that holds no run.
    """
    loaded = [_Run(Path(run)) for run in runs]
    if not loaded:
        raise UserError("report needs at least one run folder")
    out = Path(out) if out else loaded[0].folder / "report.html"
    title = " vs ".join(run.name for run in loaded)
    sections = [f"<h1>{html.escape(title)}</h1>", *(_headline(run) for run in loaded), _quality(loaded)]
    sections += ["<h2>Curves</h2>", f'<div class="plots">{"".join(_plots(loaded))}</div>']
    sections.append(_memory(loaded))
    sections += [profile_page.section(run.profile) for run in loaded if run.profile]
    sections += [_environment(run) for run in loaded]
    text = document(title, sections)
    with writable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    return out


class _Run:
    """What the page needs of one run folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} is no run folder (no config.json); give the --out folder of `opengem train`")
        self.folder = folder
        self.config = _object(folder / "config.json", "name")
        self.lines = read_metrics(folder)
        self.summary = _object(folder / "summary.json")
        self.profile = _object(folder / "profile.json", *profile_page.NEEDED)
        self.name = f"{self.config['name']} ({folder.name})"

    def series(self, *path: str) -> tuple[list[int], list[float]]:
        """(samples, values) of one quantity along the run, undefined points left out."""
        values = [reduce(lambda at, key: (at or {}).get(key), path, line) for line in self.lines]
        points = [(line["samples"], y) for line, y in zip(self.lines, values, strict=True) if y is not None]
        return [x for x, _ in points], [y for _, y in points]


def _object(path: Path, *keys: str) -> dict:
    """The JSON object in a file, {} where there is no file."""
    return parse(path.read_text(errors="replace"), str(path), *keys) if path.is_file() else {}


def _headline(run: _Run) -> str:
    s = run.summary
    boxes = [("samples/s", number(s.get("samples_per_s"), 0)), ("steps", number(s.get("steps"), 0))]
    if s.get("mfu"):
        boxes.insert(0, ("E2E MFU (attention backward x2)", f"{s['mfu']:.1%}"))
    for split, tasks in s.get("splits", {}).items():
        for task, m in tasks.items():
            boxes += [(f"{split} NE, {task}", number(m["ne"])), (f"{split} AUC, {task}", number(m["auc"]))]
    if run.lines:
        boxes.append(("padding avoided", f"{run.lines[-1]['padding_avoided']:.0%}"))
        boxes.append(("peak memory", f"{run.lines[-1]['memory_bytes'] / 2**30:.2f} GiB"))
    state = "" if s else '<p class="note">The run has not finished: no final figures yet.</p>'
    return f"<h2>{html.escape(run.name)}</h2>{state}{tiles(boxes)}"


def _memory(runs: list[_Run]) -> str:
    """Bytes by category at the last line of each run."""
    last = {run.name: run.lines[-1].get("memory", {}) for run in runs if run.lines}
    kinds = dict.fromkeys(kind for held in last.values() for kind in held)
    rows = [(kind.replace("_", " "), *(number(held.get(kind, 0) / 2**30, 3) for held in last.values()))
            for kind in kinds]
    note = "GiB at the peak. Activations: all that is in no other row, gradients and workspaces too."
    return f'<h2>Memory</h2>{table(("", *last), rows)}<p class="note">{note}</p>' if rows else ""


def _quality(runs: list[_Run]) -> str:
    """Model and baselines on the same rows."""
    rows = []
    for run in runs:
        suffix = f" ({run.folder.name})" if len(runs) > 1 else ""
        models = {name + suffix: splits for name, splits in run.summary.get("baselines", {}).items()}
        for name, splits in ({run.name: run.summary.get("splits", {})} | models).items():
            rows += [(name, split, task, m) for split, tasks in splits.items() for task, m in tasks.items()]
    if not rows:
        return ""
    keys = ("ne", "auc", "logloss", "calibration")
    head = ("model", "split", "task", "NE", "AUC", "log loss", "calibration", "rows")
    body = [(name, split, task, *(number(m[key]) for key in keys), f"{m['rows']:,}") for name, split, task, m in rows]
    note = "NE: log loss over the entropy of the training split's base rate; below 1 is better than that constant."
    return (
        f'<h2>Quality</h2>{table(head, body)}<p class="note">{note} '
        "Baselines were fitted in the same run and scored on the same rows.</p>"
    )


def _plots(runs: list[_Run]) -> list[str]:
    figures = []
    tasks = dict.fromkeys(task for run in runs for line in run.lines[-1:] for task in line["tasks"])
    for task in tasks:
        curves = [(run.name, *run.series("tasks", task, "ne")) for run in runs]
        figures.append(_lines(f"Progressive NE, {task}", "NE since the last line", curves))
    figures.append(_lines("Loss", "training loss", [(run.name, *run.series("loss")) for run in runs]))
    figures += [_calibration(runs, task) for task in tasks]
    figures.append(_lines("Throughput", "samples/s", [(run.name, *run.series("samples_per_s")) for run in runs]))
    figures.append(_lines("E2E MFU", "% of the dense bf16 peak",
                          [(run.name, x, [100 * v for v in y]) for run in runs for x, y in [run.series("mfu")]]))
    memory = [(run.name, *run.series("memory_bytes")) for run in runs]
    figures.append(_lines("Peak memory", "GiB", [(name, x, [v / 2**30 for v in y]) for name, x, y in memory]))
    for run in runs:
        where = f" of {run.name}" if len(runs) > 1 else ""
        lengths = run.summary.get("lengths", {}).items()
        figures += [_lengths(name.removesuffix(".timestamp") + where, counts) for name, counts in lengths]
    return [figure for figure in figures if figure]


def _lines(title: str, label: str, curves: list[tuple[str, list[int], list[float]]]) -> str:
    if not any(y for _, _, y in curves):
        return ""
    figure, axes = drawing.axes()
    for colour, (name, x, y) in zip(cycle(drawing.COLOURS), curves, strict=False):
        axes.plot(x, y, color=colour, linewidth=1.4, label=name)
    axes.set_xlabel("samples")
    axes.set_ylabel(label)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    return drawing.svg(figure, title)


def _calibration(runs: list[_Run], task: str) -> str:
    figure, axes = drawing.axes()
    top = 0.0
    for colour, run in zip(cycle(drawing.COLOURS), runs, strict=False):
        for tasks in run.summary.get("splits", {}).values():
            points = tasks.get(task, {}).get("calibration_curve", [])
            x, y = [p["predicted"] for p in points], [p["observed"] for p in points]
            axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1, label=run.name)
            top = max([top, *x, *y])
    axes.plot([0, top], [0, top], color="#9aa1a9", linewidth=0.8, linestyle="--")
    axes.set_xlabel("mean prediction")
    axes.set_ylabel("mean label")
    return drawing.svg(figure, f"Calibration, {task}") if top else ""


def _lengths(name: str, counts: list[int]) -> str:
    """Histogram of history lengths, and what padding every history to the longest would waste."""
    total, tokens = sum(counts), sum(length * count for length, count in enumerate(counts))
    longest = max((length for length, count in enumerate(counts) if count), default=0)
    if not total or not longest:
        return ""
    width = max(1, (longest + 1) // 40)
    bars = [sum(counts[start : start + width]) for start in range(0, longest + 1, width)]
    figure, axes = drawing.axes()
    axes.bar([i * width for i in range(len(bars))], bars, width=width * 0.9, align="edge", color=drawing.COLOURS[0])
    axes.set_xlabel("events in the history")
    axes.set_ylabel("samples")
    waste = 1 - tokens / (total * longest)
    return drawing.svg(figure, f"History lengths, {name}: padding would waste {waste:.0%}")


def _environment(run: _Run) -> str:
    facts = run.summary.get("environment", {})
    config = html.escape(json.dumps(run.config, indent=2))
    return (
        f"<h2>Environment and configuration: {html.escape(run.name)}</h2>"
        f"{table((), facts.items())}"
        f"<details><summary>config.json (re-runs the job)</summary><pre>{config}</pre></details>"
    )
