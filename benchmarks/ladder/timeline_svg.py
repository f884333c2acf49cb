"""Draw what ran on the device, as `sparse_dist_check.py --timeline` wrote it: one panel a file, one lane a stream.

    python benchmarks/ladder/timeline_svg.py OUT.svg --ms 45 "V2, copies=timeline_v2.json@85" ...
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

WIDTH, LANE, LEFT, TOP = 1100, 22, 150, 46
KINDS = (  # the first whose words fit counts
    ("exchange", "#c0392b", ("nccl",)),
    ("dense stand-in", "#95a5a6", ("gemm", "cutlass", "nvjet", "xmma")),
    ("sort, number, list ids", "#2980b9", ("sort", "scan", "unique", "piece", "search", "histogram", "reduce_by")),
    ("look-up, update", "#27ae60", ("update_", "combine", "index", "gather", "lookup", "embedding")),
    ("copies and the rest", "#d9b44a", ("",)),
)


def kind_of(name: str) -> tuple[str, str]:
    label, colour, _ = next(kind for kind in KINDS if any(word in name.lower() for word in kind[2]))
    return label, colour


def panel(title: str, events: list, begin: float, length: float, y: int) -> tuple[list[str], int]:
    """SVG lines of one file and the height they take; times in microseconds from the first event."""
    origin = min(e[1] for e in events)
    shown = [(s, b - origin - begin, d, n) for s, b, d, n in events]
    shown = [(s, max(b, 0.0), min(b + d, length), n) for s, b, d, n in shown if b + d > 0 and b < length]
    busy = {s: sum(e - b for t, b, e, _ in shown if t == s) for s, *_ in shown}
    streams = sorted((s for s in busy if busy[s] > 0.002 * length), key=lambda s: -busy[s])
    out = [f'<text x="{LEFT}" y="{y + 12}" font-weight="bold">{escape(title)}</text>']
    scale = (WIDTH - LEFT - 10) / length
    for lane, stream in enumerate(streams):
        top = y + 20 + lane * LANE
        out.append(f'<text x="6" y="{top + 13}">{"side" if lane else "main"} stream {stream}</text>')
        for t, b, e, name in shown:
            if t == stream:
                out.append(
                    f'<rect x="{LEFT + b * scale:.1f}" y="{top}" width="{max((e - b) * scale, 0.3):.1f}" '
                    f'height="{LANE - 6}" fill="{kind_of(name)[1]}"><title>{escape(name)}: {(e - b) / 1e3:.3f} ms'
                    "</title></rect>"
                )
    bottom = y + 20 + len(streams) * LANE
    for ms in range(0, int(length / 1e3) + 1, 5):
        x = LEFT + ms * 1e3 * scale
        out.append(f'<line x1="{x:.1f}" y1="{y + 18}" x2="{x:.1f}" y2="{bottom}" stroke="#ccc" stroke-width="0.5"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 12}" font-size="9">{ms} ms</text>')
    return out, bottom - y + 26


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("panels", nargs="+", help="TITLE=FILE, or TITLE=FILE@first millisecond")
    parser.add_argument("--ms", type=float, default=45.0)
    arguments = parser.parse_args()
    lines, y = [], TOP
    for given in arguments.panels:
        title, _, rest = given.rpartition("=")
        file, _, begin = rest.partition("@")
        drawn, height = panel(title, json.loads(Path(file).read_text()), float(begin or 0) * 1e3, arguments.ms * 1e3, y)
        lines += drawn
        y += height
    legend = "".join(
        f'<rect x="{LEFT + i * 180}" y="10" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 16 + i * 180}" y="20">{label}</text>'
        for i, (label, colour, _) in enumerate(KINDS)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    arguments.out.write_text("\n".join([head, ground, legend, *lines, "</svg>\n"]))


if __name__ == "__main__":
    main()
