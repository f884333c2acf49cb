"""One self-contained HTML page about a run, or several runs compared: no network, no scripts, plots as inline SVG."""

from __future__ import annotations

import html
import io
import json
import re
from functools import reduce
from itertools import cycle
from pathlib import Path

from opengem.data.files import writable
from opengem.errors import UserError
from opengem.runlog import parse, read_metrics, write_whole

COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#8a3f8f", "#7a6a1d", "#4a4a4a")

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; margin: 0 auto; max-width: 62rem;
       padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; }
.tile { border: 1px solid #d9dde2; border-radius: 8px; padding: .5rem .9rem; min-width: 7rem; }
.tile b { display: block; font-size: 1.35rem; } .tile span, figcaption, .note { color: #5a626c; font-size: .85rem; }
figure { margin: 0; } .plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .3rem .7rem; text-align: right;
        border-bottom: 1px solid #e5e8ec; white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
pre { background: #f5f6f8; padding: .75rem; overflow-x: auto; font-size: .8rem; border-radius: 6px; }
"""


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
    sections += [_environment(run) for run in loaded]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    icon = '<link rel="icon" href="data:,">'
    head = f'<meta charset="utf-8">{viewport}{icon}<title>{html.escape(title)}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'
    with writable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page)
    return out


class _Run:
    """What the page needs of one run folder."""

    def __init__(self, folder: Path) -> None:
        config, summary = folder / "config.json", folder / "summary.json"
        if not config.is_file():
            raise UserError(f"{folder} is no run folder (no config.json); give the --out folder of `opengem train`")
        self.folder = folder
        self.config = parse(config.read_text(), str(config))
        self.lines = read_metrics(folder)
        self.summary = parse(summary.read_text(), str(summary)) if summary.is_file() else {}
        self.name = f"{self.config['name']} ({folder.name})"

    def series(self, *path: str) -> tuple[list[int], list[float]]:
        """(samples, values) of one quantity along the run, undefined points left out."""
        values = [reduce(lambda at, key: (at or {}).get(key), path, line) for line in self.lines]
        points = [(line["samples"], y) for line, y in zip(self.lines, values, strict=True) if y is not None]
        return [x for x, _ in points], [y for _, y in points]


def _headline(run: _Run) -> str:
    s = run.summary
    tiles = [("samples/s", _number(s.get("samples_per_s"), 0)), ("steps", _number(s.get("steps"), 0))]
    if s.get("mfu"):
        tiles.insert(0, ("E2E MFU (attention backward x2)", f"{s['mfu']:.1%}"))
    for split, tasks in s.get("splits", {}).items():
        for task, m in tasks.items():
            tiles += [(f"{split} NE, {task}", _number(m["ne"])), (f"{split} AUC, {task}", _number(m["auc"]))]
    if run.lines:
        tiles.append(("padding avoided", f"{run.lines[-1]['padding_avoided']:.0%}"))
        tiles.append(("peak memory", f"{run.lines[-1]['memory_bytes'] / 2**30:.2f} GiB"))
    state = "" if s else '<p class="note">The run has not finished: no final figures yet.</p>'
    boxes = "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(name)}</span></div>' for name, value in tiles)
    return f"<h2>{html.escape(run.name)}</h2>{state}<div class='tiles'>{boxes}</div>"


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
    head = "".join(f"<th>{h}</th>" for h in ("model", "split", "task", "NE", "AUC", "log loss", "calibration", "rows"))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(split)}</td><td>{html.escape(task)}</td>"
        + "".join(f"<td>{_number(m[key])}</td>" for key in keys)
        + f"<td>{m['rows']:,}</td></tr>"
        for name, split, task, m in rows
    )
    note = "NE: log loss over the entropy of the training split's base rate; below 1 is better than that constant."
    return (
        f'<h2>Quality</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div><p class="note">{note} '
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
    figure, axes = _axes()
    for colour, (name, x, y) in zip(cycle(COLOURS), curves, strict=False):
        axes.plot(x, y, color=colour, linewidth=1.4, label=name)
    axes.set_xlabel("samples")
    axes.set_ylabel(label)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    return _svg(figure, title)


def _calibration(runs: list[_Run], task: str) -> str:
    figure, axes = _axes()
    top = 0.0
    for colour, run in zip(cycle(COLOURS), runs, strict=False):
        for tasks in run.summary.get("splits", {}).values():
            points = tasks.get(task, {}).get("calibration_curve", [])
            x, y = [p["predicted"] for p in points], [p["observed"] for p in points]
            axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1, label=run.name)
            top = max([top, *x, *y])
    axes.plot([0, top], [0, top], color="#9aa1a9", linewidth=0.8, linestyle="--")
    axes.set_xlabel("mean prediction")
    axes.set_ylabel("mean label")
    return _svg(figure, f"Calibration, {task}") if top else ""


def _lengths(name: str, counts: list[int]) -> str:
    """Histogram of history lengths, and what padding every history to the longest would waste."""
    total, tokens = sum(counts), sum(length * count for length, count in enumerate(counts))
    longest = max((length for length, count in enumerate(counts) if count), default=0)
    if not total or not longest:
        return ""
    width = max(1, (longest + 1) // 40)
    bars = [sum(counts[start : start + width]) for start in range(0, longest + 1, width)]
    figure, axes = _axes()
    axes.bar([i * width for i in range(len(bars))], bars, width=width * 0.9, align="edge", color=COLOURS[0])
    axes.set_xlabel("events in the history")
    axes.set_ylabel("samples")
    waste = 1 - tokens / (total * longest)
    return _svg(figure, f"History lengths, {name}: padding would waste {waste:.0%}")


def _axes():
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e8ec", linewidth=0.6)
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure, title: str) -> str:
    """The figure as an inline SVG with a caption."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = re.sub(r'<g id="[^"]*"', "<g", text.getvalue())  # the same in every figure, so no ids of one page
    return f"<figure>{drawing[drawing.index('<svg') :]}<figcaption>{html.escape(title)}</figcaption></figure>"


def _environment(run: _Run) -> str:
    facts = run.summary.get("environment", {})
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    config = html.escape(json.dumps(run.config, indent=2))
    return (
        f"<h2>Environment and configuration: {html.escape(run.name)}</h2>"
        f"<div class='scroll'><table>{rows}</table></div>"
        f"<details><summary>config.json (re-runs the job)</summary><pre>{config}</pre></details>"
    )


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
