"""Drawings of a report, as inline SVG: no scripts, no network, text stays text."""

from __future__ import annotations

import html
import io
import re
from itertools import cycle

COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#8a3f8f", "#7a6a1d", "#4a4a4a")
WIDE = 5.2
"""inches of a drawing over the whole width; more would make the text too small for a phone"""


def axes(width: float = 4.6, height: float = 3.0):
    """(figure, its axes), inches."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    plot = figure.add_subplot()
    plot.spines[["top", "right"]].set_visible(False)
    plot.grid(color="#e5e8ec", linewidth=0.6)
    plot.set_axisbelow(True)
    plot.tick_params(labelsize=8)
    return figure, plot


def svg(figure, title: str) -> str:
    """The figure as an inline SVG with a caption."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = re.sub(r'<g id="[^"]*"', "<g", text.getvalue())  # the same in every figure, so no ids of one page
    return f"<figure>{drawing[drawing.index('<svg') :]}<figcaption>{html.escape(title)}</figcaption></figure>"


def roofline(rows: list[dict], tflops: float, gbs: float) -> str:
    """Achieved TFLOPS over arithmetic intensity (FLOPs a byte), one point a row, under the two roofs."""
    points = [row for row in rows if row["tflops"] and row["intensity"]]
    if not points:
        return ""
    figure, plot = axes(WIDE, 3.8)
    ridge = 1e3 * tflops / gbs
    low = min([ridge, *(row["intensity"] for row in points)]) / 2
    high = max([ridge, *(row["intensity"] for row in points)]) * 4
    plot.loglog([low, ridge, high], [low * gbs / 1e3, tflops, tflops], color="#4a4a4a", linewidth=1.2)
    for colour, row in zip(cycle(COLOURS), points, strict=False):
        plot.plot(row["intensity"], row["tflops"], "o", color=colour, markersize=5)
        plot.annotate(row["name"], (row["intensity"], row["tflops"]), (5, 3), textcoords="offset points", fontsize=7)
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_minor_formatter(lambda *_: "")
    plot.set_xlabel("FLOPs a byte that must move")
    plot.set_ylabel("useful TFLOPS")
    return svg(figure, f"Roofline: {tflops:,.4g} TFLOPS, {gbs:,.0f} GB/s")


def timeline(stretches: list[list], step_ms: float) -> str:
    """One step: a lane for each kind of layer. stretches: start, length, kind, phase of each."""
    lanes = list(dict.fromkeys(kind for _, _, kind, _ in stretches))
    figure, plot = axes(WIDE, 0.6 + 0.22 * len(lanes))
    for lane, kind in enumerate(lanes):
        colour = COLOURS[lane % len(COLOURS)]
        for phase, opacity in (("forward", 1.0), ("backward", 0.55), ("recompute", 0.3)):
            bars = [(at, ms) for at, ms, k, p in stretches if (k, p) == (kind, phase) and ms > step_ms / 5000]
            plot.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, alpha=opacity)
    plot.set_yticks(range(len(lanes)), lanes, fontsize=7)
    plot.invert_yaxis()
    plot.set_xlabel("milliseconds; forward dark, backward light")
    return svg(figure, "One training step")


def waterfall(start: float, losses: list[tuple[str, float]], end: tuple[str, float], title: str) -> str:
    """What takes `start` per cent down to `end`: one falling bar for each (name, points)."""
    figure, plot = axes(WIDE, 0.9 + 0.28 * len(losses))
    names, at = ["dense bf16 peak"], start
    plot.barh(0, start, color="#c9ced6")
    for lane, (name, points) in enumerate(losses, 1):
        plot.barh(lane, points, left=at - points, color=COLOURS[1])
        plot.annotate(f"-{points:.1f}", (at, lane), (4, -3), textcoords="offset points", fontsize=7)
        names, at = [*names, name], at - points
    plot.barh(len(names), end[1], color=COLOURS[0])
    plot.annotate(f"{end[1]:.1f}", (end[1], len(names)), (4, -3), textcoords="offset points", fontsize=7)
    plot.set_yticks(range(len(names) + 1), [*names, end[0]], fontsize=7)
    plot.invert_yaxis()
    plot.set_xlabel("% of the dense bf16 peak")
    return svg(figure, title)
