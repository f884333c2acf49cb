"""The text of `opengem profile`: headline, layers worst first, kernels, and the four conditions of scaling."""

from __future__ import annotations

from opengem.efficiency import hardware
from opengem.efficiency.flops import TRAINING
from opengem.efficiency.profile import by_kind

GI = 2**30


def text(result: dict) -> str:
    """Everything, about 60 lines of at most 120 columns."""
    return "\n".join([*headline(result), "", *layers(result), "", *singles(result), "", *kernels(result), "",
                      *conditions(result)])  # fmt: skip


def headline(r: dict) -> list[str]:
    now = r["now"]
    lines = [
        f"{r['recipe']} on {r['device']}, {r['dtype']}: {r['samples']:,} samples and {r['tokens']:,} events a step",
        f"step {r['step_ms']:.2f} ms = {r['samples_per_s']:,.0f} samples/s, {r['tokens_per_s']:,.0f} events/s, "
        f"{r['useful_tflops']:.4g} useful TFLOPS ({r['useful_tflops'] / now['tflops']:.1%} of a matrix product now, "
        f"{now['tflops']:.3g} TFLOPS; a copy reaches {now['gbs']:.0f} GB/s)",
    ]  # fmt: skip
    if r["scaling_ratio"]:
        lines.append(
            f"E2E MFU {r['e2e_mfu']:.1%} = Local MFU {r['local_mfu']:.1%} x Scaling Ratio {r['scaling_ratio']:.3f}; "
            f"attention's backward counted twice (counted 2.5 times: E2E {r['e2e_mfu_attention_x2.5']:.1%})"
        )
    else:
        lines.append(hardware.why_no_mfu(r["device"]))
    slow = "" if r["peak_bytes"] else f", {r['traced_ms']:.2f} ms under the profiler"
    if r["peak_bytes"]:
        lines.append(f"peak memory {r['peak_bytes'] / GI:.1f} GiB")
    lines.append(
        f"layers {r['attributed_ms']:.2f} ms + host {r['host_ms']:.2f} ms are {r['accounted']:.1%} of the step{slow}; "
        f"bounds: {r['bound']['tflops']:.4g} TFLOPS, {r['bound']['gbs']:.0f} GB/s ({r['bound']['source']})"
    )
    return lines


HEAD = (f"{'layer':<22}{'GFLOP':>9}{'GB':>8}{'FLOP/B':>8}{'fwd ms':>9}{'bwd ms':>9}{'share':>7}{'TFLOPS':>8}{'GB/s':>7}"
        f"{'bound':>9} {'roof':<8}{'lost ms':>8}{'launches':>9}")  # fmt: skip


def layers(r: dict) -> list[str]:
    """The table of kinds of layers, most time lost first."""
    whole = r["attributed_ms"] + r["host_ms"]
    lines = [HEAD] + [line(row, whole) for row in by_kind(r["rows"])]
    if r["host_ms"]:
        lines.append(f"{'host':<22}{'':>25}{r['host_ms']:>9.3f}{'':>9}{r['host_ms'] / whole:>7.1%}")
    return lines


def line(row: dict, whole_ms: float) -> str:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{value:>{width},.{digits}f}" if value else f"{'':>{width}}"

    gflop, moved = TRAINING * row["flops"] / 1e9, (row["forward_bytes"] + row["backward_bytes"]) / 1e9
    tflops = number(row["tflops"], 8, 1 if (row["tflops"] or 0) >= 1 else 3)
    return (
        f"{row['name']:<22}{number(gflop, 9, 1)}{number(moved, 8, 2)}{number(row['intensity'], 8, 0)}"
        f"{row['forward_ms']:>9.3f}{row['backward_ms'] + row['recompute_ms']:>9.3f}{row['ms'] / whole_ms:>7.1%}"
        f"{tflops}{number(row['gbs'], 7, 0)}{row['bound_ms']:>9.3f} {row['roof']:<8}"
        f"{row['lost_ms']:>8.3f}{row['kernels']:>9.0f}"
    )


def singles(r: dict, most: int = 8) -> list[str]:
    return ["single layers that lose most", HEAD] + [
        line(row, r["attributed_ms"] + r["host_ms"]) for row in r["rows"][:most]
    ]


def kernels(r: dict, most: int = 12) -> list[str]:
    lines = ["kernels that take longest"]
    for k in r["kernels"][:most]:
        name = k["kernel"].removeprefix("void ").split("<")[0][-44:]
        lines.append(f"{k['ms']:>9.3f} ms {k['count']:>5} x  {k['kind']:<18}{k['phase']:<9} {name:<45} {k['op'][:60]}")
    return lines


def conditions(r: dict) -> list[str]:
    lines = [f"{'what keeps a step from scaling':<40}{'ms':>9}{'MFU points':>12}"]
    for c in r["conditions"]:
        points = "" if c["mfu_points"] is None else f"{c['mfu_points']:.2f}"
        lines.append(f"{c['condition']:<40}{c['ms']:>9.2f}{points:>12}")
    return lines
