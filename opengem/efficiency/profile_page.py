"""The profile of a step as a section of an HTML page: headline, what the peak is lost to, roofline, timeline."""

from __future__ import annotations

import html

from opengem.efficiency import drawing, hardware
from opengem.efficiency.flops import TRAINING
from opengem.efficiency.page import number, table, tiles
from opengem.efficiency.profile import by_kind

NEEDED = ("recipe", "device", "dtype", "step_ms", "bound", "now", "rows", "kernels", "timeline", "conditions")


def section(r: dict) -> str:
    """r: what `profile.measure` returned, with the recipe's name."""
    kinds = by_kind(r["rows"])
    title = f"Profile of a step: {r['recipe']} on {r['device']}, {r['dtype']}"
    parts = [f"<h2>{html.escape(title)}</h2>", _headline(r), _waterfall(r, kinds)]
    parts += [drawing.roofline(kinds, r["bound"]["tflops"], r["bound"]["gbs"])]
    parts += [drawing.timeline(r["timeline"], r["step_ms"]), "<h3>Layers, most time lost first</h3>", _layers(r, kinds)]
    parts += ["<h3>What keeps a step from scaling</h3>", _conditions(r), "<h3>Longest kernels</h3>", _kernels(r)]
    return "".join(parts)


def _headline(r: dict) -> str:
    boxes = []
    if r["scaling_ratio"]:
        boxes += [("E2E MFU", f"{r['e2e_mfu']:.1%}"), ("= Local MFU", f"{r['local_mfu']:.1%}")]
        boxes += [("x Scaling Ratio", number(r["scaling_ratio"], 3))]
    boxes += [("useful TFLOPS", f"{r['useful_tflops']:.4g}"), ("samples/s", number(r["samples_per_s"], 0))]
    boxes += [("events/s", number(r["tokens_per_s"], 0)), ("ms a step", number(r["step_ms"], 2))]
    if r["peak_bytes"]:
        boxes.append(("peak memory", f"{r['peak_bytes'] / 2**30:.1f} GiB"))
    notes = [f"{r['samples']:,} samples and {r['tokens']:,} events a step."]
    if r["scaling_ratio"]:
        more = r["e2e_mfu_attention_x2.5"]
        notes.append(f"Attention's backward counts twice its forward; counted 2.5 times the E2E MFU is {more:.1%}.")
    else:
        notes.append(hardware.why_no_mfu(r["device"]) + ".")
    notes.append(
        f"In this process a matrix product reaches {r['now']['tflops']:.4g} TFLOPS and a copy {r['now']['gbs']:,.0f} "
        f"GB/s. Layers take {r['attributed_ms']:,.2f} ms, the host {r['host_ms']:,.2f} ms; together "
        f"{r['accounted']:.1%} of the step."
    )
    return f'{tiles(boxes)}<p class="note">{html.escape(" ".join(notes))}</p>'


def _waterfall(r: dict, kinds: list[dict]) -> str:
    """From the peak to the E2E MFU: each kind of layer costs its time beyond useful FLOPs at the peak."""
    if not r["scaling_ratio"]:
        return ""
    beyond = [(row["kind"], row["ms"] - TRAINING * row["flops"] / r["peak_tflops"] / 1e9) for row in kinds]
    beyond.append(("host", r["host_ms"]))
    losses = sorted(((name, 100 * ms / r["step_ms"]) for name, ms in beyond), key=lambda loss: -loss[1])
    rest = 100 - 100 * r["e2e_mfu"] - sum(points for _, points in losses[:9])
    return drawing.waterfall(100, [*losses[:9], ("all else", rest)], ("E2E MFU", 100 * r["e2e_mfu"]),
                             "Where the peak goes")  # fmt: skip


def _layers(r: dict, kinds: list[dict]) -> str:
    head = ("layer", "GFLOP", "GB", "FLOP/B", "forward ms", "backward ms", "share", "TFLOPS", "bound ms", "roof",
            "lost ms")  # fmt: skip
    whole = r["attributed_ms"] + r["host_ms"]

    def cells(row: dict) -> tuple:
        moved = (row["forward_bytes"] + row["backward_bytes"]) / 1e9
        backward = row["backward_ms"] + row["recompute_ms"]
        sizes = row["name"], number(TRAINING * row["flops"] / 1e9, 1), number(moved, 2), number(row["intensity"], 0)
        times = number(row["forward_ms"], 3), number(backward, 3), f"{row['ms'] / whole:.1%}"
        rates = f"{row['tflops'] or 0:.4g}", number(row["bound_ms"], 3), row["roof"], number(row["lost_ms"], 3)
        return *sizes, *times, *rates

    return table(head, map(cells, kinds))


def _conditions(r: dict) -> str:
    rows = [(c["condition"], number(c["ms"], 2), number(c["mfu_points"], 2)) for c in r["conditions"]]
    return table(("condition", "ms", "MFU points"), rows)


def _kernels(r: dict, most: int = 20) -> str:
    rows = [
        (k["kernel"].removeprefix("void ").split("<")[0][-60:], k["kind"], k["phase"], f"{k['count']:,}",
         number(k["ms"], 3), k["op"][:80])
        for k in r["kernels"][:most]
    ]  # fmt: skip
    return table(("kernel", "layer", "phase", "launches", "ms", "operation"), rows)
