"""The shell of an HTML page and its tables: one file, no scripts, readable on a phone."""

from __future__ import annotations

import html
from collections.abc import Iterable

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; margin: 0 auto; max-width: 62rem;
       padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; }
.tile { border: 1px solid #d9dde2; border-radius: 8px; padding: .5rem .9rem; min-width: 7rem; }
.tile b { display: block; font-size: 1.35rem; } .tile span, figcaption, .note { color: #5a626c; font-size: .85rem; }
figure { margin: 0; max-width: 46rem; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .3rem .7rem; text-align: right;
        border-bottom: 1px solid #e5e8ec; white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
pre { background: #f5f6f8; padding: .75rem; overflow-x: auto; font-size: .8rem; border-radius: 6px; }
"""


def document(title: str, sections: Iterable[str]) -> str:
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    icon = '<link rel="icon" href="data:,">'
    head = f'<meta charset="utf-8">{viewport}{icon}<title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """(name, value): a row of boxes."""
    boxes = "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="tiles">{boxes}</div>'


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table that scrolls sideways where it is wider than the screen."""
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(c))}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
