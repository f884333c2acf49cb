"""Quantised norms in clusters, and the layer norm forward: right, and how fast?

    python benchmarks/ladder/norm_cluster.py compile I N     share I of N of all kernels, without running one
    python benchmarks/ladder/norm_cluster.py check KIND clusters|alone   bits against the kernel before; exit status 1
    python benchmarks/ladder/norm_cluster.py time OUT clusters|alone|both KIND...
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ladder import norm_old, norm_variants
from opengem.kernels.launch import kind_of, launch
from opengem.kernels.norm import cost, gluon_sm90
from opengem.kernels.norm import triton as portable

ELEMENTS, DEVICE = 1 << 28, "cuda"
KINDS = {  # barriers a slice, sums by warps
    "v11": {"early": True, "by_warp": False}, "v12": {"early": True, "by_warp": True},
    "v13": {"early": True, "by_warp": True, "packed": True}, "v14": {"by_warp": True}}  # v14: what is in the package
TIMED = [  # width, residual, tiles, parts
    (256, False, 2, 1), (512, False, 1, 2), (1024, False, 1, 4), (1024, False, 1, 2), (2048, False, 1, 4),
    (2048, False, 1, 2), (4096, False, 1, 4), (4096, False, 1, 2), (2048, False, 1, 8), (4096, False, 1, 8),
    (512, True, 1, 2), (1024, True, 1, 2), (2048, True, 1, 2), (4096, True, 1, 2), (1024, True, 1, 1),
    (2048, True, 1, 1), (4096, True, 1, 4)]
CHECKED = [  # width, tiles, parts
    (256, 2, 1), (1024, 1, 4), (1024, 1, 2), (1040, 1, 4), (2048, 1, 4), (2064, 1, 4), (2048, 1, 2), (4096, 1, 4),
    (4096, 1, 2), (8192, 1, 4), (8192, 1, 2)]
LAYER = {  # width: rows a program, warps; the first is what the package takes
    256: [(16, 4), (4, 1), (8, 1), (8, 2), (2, 1), (16, 2)], 512: [(8, 4), (2, 1), (4, 1), (4, 2), (1, 1)],
    1024: [(4, 4), (1, 1), (2, 1), (2, 2), (8, 4)], 2048: [(4, 8), (1, 1), (1, 2), (2, 2), (2, 4)]}


def fits(kind: str, width: int, residual: bool, centered: bool, tiles: int, parts: int) -> bool:
    members = -(-width // (256 * parts))
    box = 1024 + members * (1024 if KINDS[kind]["by_warp"] else 128) * tiles * (1 + centered)
    dynamic = tiles * parts * (2 if residual else 1) * 16384
    return members <= 8 and dynamic + box < (227 if dynamic > 49000 else 47) * 1024


def cases() -> list[tuple]:
    """(kind, width, residual, centered, tiles, parts, registers) of everything that is compiled."""
    timed = [(k, w, r, False, t, p, n) for k in KINDS for w, r, t, p in TIMED if k in ("v12", "v13", "v14") or p in (2, 4)
             for n in ([None, 48] if p == 2 and not r and k == "v13" else [None])]
    checked = [(k, w, r, c, t, p, None) for k in KINDS for w, t, p in CHECKED for r in (False, True)
               for c in ((False, True) if p == 4 or w in (256, 4096) else (False,))
               if not (r and p == 4 and w < 8192) and (k in ("v13", "v14") or w in (1040, 4096))]
    return [case for case in dict.fromkeys(timed + checked) if fits(case[0], *case[1:6])]


def call(inputs: tuple, case: tuple):
    x, residual, weight, bias = inputs
    kind, _, has_residual, centered, tiles, parts, registers = case
    if kind == "v14":
        gluon_sm90._plan = lambda slices, residual: (tiles, parts, -(-slices // parts))
        return gluon_sm90.norm_quantize_forward(x, residual if has_residual else None, weight,
                                                   bias if centered else None, 1e-5, centered)
    return norm_variants.norm_quantize_forward(
        x, residual if has_residual else None, weight, bias if centered else None, 1e-5, centered, tiles, parts,
        registers=registers, **KINDS[kind])


def shipped(inputs: tuple, has_residual: bool, centered: bool):
    x, residual, weight, bias = inputs
    return norm_old.norm_quantize_forward(x, residual if has_residual else None, weight, bias if centered else None,
                                          1e-5, centered)


def make(rows: int, width: int, dtype=torch.bfloat16) -> tuple:
    x, residual = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for _ in range(2))
    return x, residual, torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)


def compile_share(index: int, count: int) -> None:
    def only(kernel, grid, key, arguments, constants, warps=4, stages=3, registers=None, cluster=1):
        limit = {} if registers is None else {"maxnreg": registers}
        kernel.warmup(*arguments, *constants, grid=grid, num_warps=warps, num_stages=stages, **limit)

    norm_old.launch = norm_variants.launch = gluon_sm90.launch = only
    todo = cases()
    todo += sorted({(None, *case[1:4]) for case in todo}, key=str)
    for case in todo[index::count]:
        inputs = make(64, case[1])
        if case[0] is None:
            shipped(inputs, *case[2:4])
        else:
            call(inputs, case)


def compile_peers() -> None:
    """Fills Inductor's cache and Triton's with what `time` runs of the layer norm."""
    for width in LAYER:
        x, _, weight, _ = make(ELEMENTS // width, width)
        with torch.no_grad():
            compiled_layer()(x, weight)
            for rows, warps in LAYER[width]:
                layer(x, weight, rows, warps)
    torch.cuda.synchronize()


def compiled_layer():
    return torch.compile(lambda x, w: F.layer_norm(x.float(), x.shape[1:], w, None, 1e-5).to(x.dtype), dynamic=False)


def layer(x, weight, rows, warps):
    width = x.shape[1]
    y, (total, mean, rstd) = torch.empty_like(x), portable.row_outputs(x, None, True)
    launch(portable._forward, (-(-x.shape[0] // rows), 1, 1), kind_of(x, weight, facts=(width,)),
           (x, x, weight, x, y, total, mean, rstd, x.shape[0], width, 1e-5),
           (True, False, True, False, rows, width, True), warps=warps)
    return y, mean, rstd


def check(kind: str, clusters: bool) -> int:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    wrong = 0
    todo = [case for case in cases() if case[0] == kind and case[6] is None and (case[1] > 256 * case[5]) == clusters]
    for case in todo:
        for rows, dtype in ((1, torch.bfloat16), (33, torch.bfloat16), (64 * 132 * 8 + 5, torch.bfloat16),
                            (0, torch.bfloat16)):
            torch.manual_seed(rows)
            inputs = make(rows, case[1], dtype)
            got, again = call(inputs, case), call(inputs, case)
            want = shipped(inputs, case[2], case[3])
            torch.cuda.synchronize()
            repeat = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, again, strict=True))
            elements = max(1, got[0].numel())
            data, scale = ((a.view(torch.uint8) != b.view(torch.uint8)).sum().item() for a, b in
                           zip(got[:2], want[:2], strict=True))
            blocks = scale * 1024  # all of a block whose scale is the neighbour's may differ
            total = torch.equal(got[2], want[2])
            near = [float((a - b).abs().max() / b.abs().max()) if a.numel() else 0.0 for a, b in
                    zip(got[3:], want[3:], strict=True)]
            fine = (repeat and total and max(near) < 1e-5 and scale <= 2e-6 * elements / 1024 + 1
                    and data <= 4e-6 * elements + 8 + blocks)
            wrong += not fine
            if not fine or rows > 100:
                print(json.dumps({"check": case, "rows": rows, "fine": fine, "repeat": repeat, "total": total,
                                  "data": data, "scale": scale, "elements": elements, "near": near}), flush=True)
    print(json.dumps({"kind": kind, "cases": len(todo), "wrong": wrong}), flush=True)
    return wrong > 0


def milliseconds(function, flush) -> tuple[float, float]:
    for _ in range(3):
        function()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(21)]
    for first, last in marks:
        flush.zero_()
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    low, middle, high = statistics.quantiles([a.elapsed_time(b) for a, b in marks], n=4)
    return middle, (high - low) / middle


def time_all(out: Path, kinds: list[str], clusters: str) -> None:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)

    def emit(name: str, moved: int, function) -> None:
        try:
            ms, spread = milliseconds(function, flush)
            row = {"name": name, "ms": round(ms, 4), "spread": round(spread, 3), "gbs": round(moved / ms / 1e6),
                   "share": round(moved / ms / 1e6 / copy, 3)}
        except Exception as error:
            row = {"name": name, "error": str(error)[:200]}
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    copy = 1.0
    copy = 2 * source.nbytes / milliseconds(lambda: target.copy_(source), flush)[0] / 1e6
    emit("copy", 2 * source.nbytes, lambda: target.copy_(source))
    del source, target
    for turn in range(2):
        for width in (4096, 2048, 1024, 512, 256):
            inputs = make(ELEMENTS // width, width)
            for residual in (False, True):
                moved = cost.bytes(ELEMENTS // width, width, residual=residual, quantize=True)
                here = [c for c in cases() if c[1:4] == (width, residual, False) and c[0] in kinds
                        and (width, residual, *c[4:6]) in TIMED
                        and (clusters == "both" or (width > 256 * c[5]) == (clusters == "clusters"))]
                if here:
                    emit(f"{turn} {width} {'residual ' * residual}shipped", moved,
                         lambda: shipped(inputs, residual, False))
                for case in here:
                    emit(f"{turn} {width} {'residual ' * residual}{case[0]} tiles {case[4]} parts {case[5]} "
                         f"registers {case[6]}", moved, lambda case=case: call(inputs, case))
            if width in LAYER and clusters != "clusters":
                x, _, weight, _ = inputs
                peer = compiled_layer()
                with torch.no_grad():
                    emit(f"{turn} layer {width} torch_compile", 4 * ELEMENTS, lambda: peer(x, weight))
                    for rows, warps in LAYER[width]:
                        emit(f"{turn} layer {width} rows {rows} warps {warps}", 4 * ELEMENTS,
                             lambda rows=rows, warps=warps: layer(x, weight, rows, warps))
            del inputs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["compile", index, count]:
            compile_share(int(index), int(count))
        case ["peers"]:
            compile_peers()
        case ["check", kind, clusters]:
            sys.exit(check(kind, clusters == "clusters"))
        case ["time", out, clusters, *kinds]:
            time_all(Path(out), kinds, clusters)
