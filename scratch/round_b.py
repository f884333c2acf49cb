"""Sections of round A: python scratch/round_a.py SECTION OUT; WARM=1 compiles only."""
import importlib, json, os, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch, triton
from benchmarks.ladder import mem_check as m
from benchmarks.ladder.mem_check import normal, starts, DEVICE, KIND
from benchmarks.kernels.block import HEADS, LONGEST, lengths as make_lengths
from opengem.kernels.block import cost as bc
from opengem.kernels.rope.op import rope_tables

WARM = os.environ.get("WARM") == "1"
OUT = open(sys.argv[2], "a")
if WARM:
    m.milliseconds = lambda f: (f(), torch.cuda.synchronize(), 1.0)[2]
def say(**line):
    OUT.write(json.dumps({"section": sys.argv[1]} | line) + "\n"); OUT.flush()
def attempt(copy, moved, run, **line):
    try:
        say(**line, **m.speed(run, moved, copy))
    except Exception as e:
        say(**line, error=repr(e)[:300])

def gluon(copy, only):
    import opengem.kernels.block.gluon_sm90 as keep
    import scratch.gluon_held as held
    from opengem.kernels.block import triton as port
    lens = make_lengths().tolist(); rows, off = sum(lens), starts(lens)
    for dim in (128, 64):
        q, k, v, g = (normal(rows, HEADS, dim) for _ in range(4))
        for rope in (None, False, True):
            tab = rope_tables(LONGEST, dim, device=DEVICE) if rope is not None else (q.new_empty(0, dim // 2, dtype=torch.float32),) * 2
            tail = (off, *tab, LONGEST, 64, dim ** -0.5, bool(rope))
            attempt(copy, bc.bytes(rows, HEADS, dim), lambda: keep.block_forward(q, k, v, *tail), impl="gluon", direction="forward", dim=dim, rope=rope)
            for name, mod in (("convert", keep), ("held", held)):
                for reg in (168, None) if dim == 128 else (128, 96, None):
                    if name == "held" and (rope is not False): continue
                    mod.REGISTERS[dim] = reg
                    attempt(copy, bc.backward_bytes(rows, HEADS, dim), lambda: mod.block_backward(g, q, k, v, *tail), impl=name, direction="backward", dim=dim, rope=rope, reg=reg)
            if dim == 128:
                attempt(copy, bc.bytes(rows, HEADS, dim), lambda: port.block_forward(q, k, v, *tail), impl="triton", direction="forward", dim=dim, rope=rope)
                attempt(copy, bc.backward_bytes(rows, HEADS, dim), lambda: port.block_backward(g, q, k, v, *tail), impl="triton", direction="backward", dim=dim, rope=rope)

def norm(copy, only):
    from opengem.kernels.norm import triton as n
    from opengem.kernels.norm.op import rms_norm
    from opengem.kernels.mx.op import quantize_mx
    for width in (256, 512, 1024, 2048, 4096):
        rows = (1 << 28) // width
        x, w, size = normal(rows, width), torch.randn(width, device=DEVICE), 2 << 28
        r = normal(rows, width)
        for columns in (32, 64):
            n.QUANTIZED_COLUMNS = columns
            for a in ((2, 3, 4) if width <= 1024 else (256, 512, 1024)):
                if width <= 1024: n.QUANTIZED_STAGES = a
                else: n.QUANTIZED_CHUNK = a
                attempt(copy, size + size // 2, lambda: rms_norm(x, w, quantize="e4m3"), op="rms_quantize", width=width, option=a, columns=columns)
            n.QUANTIZED_STAGES, n.QUANTIZED_CHUNK = 3, 512
            attempt(copy, 3 * size + size // 2, lambda: rms_norm(x, w, residual=r, quantize="e4m3"), op="rms_res_quantize", width=width, columns=columns)
        attempt(copy, size + size // 2, lambda: quantize_mx(x), op="quantize", width=width)

def sums(copy, only):
    from opengem.kernels.jagged_ops import triton as j
    from benchmarks.kernels import jagged as b
    x, off = b.make_values("cuda", 0); x = x.detach()
    rows, width = x.shape
    attempt(copy, (rows + b.SAMPLES) * 1024, lambda: j.segment_sum(x, off), op="segment_sum")
    index = torch.randperm(rows, device="cuda")
    for tile in (2048, 4096, 8192):
        j.USE_TILE = tile
        attempt(copy, 2 * rows * 1024, lambda: j.gather_rows_backward(x, index, rows), op="gather_bwd", tile=tile)
    counts = torch.ones(rows, dtype=torch.int32, device="cuda"); ends = counts.cumsum(0, dtype=torch.int32)
    order = index.int()
    for tile in (2048, 4096, 8192):
        out = torch.empty_like(x); t = {'ROWS': tile // 512, 'COLUMNS': 512}; grid = (triton.cdiv(rows, tile // 512),)
        for warps in (2, 4, 8):
            attempt(copy, 2 * rows * 1024, lambda: j._sum_uses[grid](x, order, ends, counts, out, rows, width, **t, num_warps=warps), op="sum_uses_only", tile=tile, warps=warps)
    arrival, ranked, order2 = (torch.empty_like(order) for _ in range(3))
    for uses in (128, 256, 512):
        grid = (triton.cdiv(rows, uses),)
        attempt(copy, 1, lambda: j._count_uses[grid](index, torch.zeros_like(counts), arrival, rows, rows, USES=uses), op="zero_and_count", uses=uses)
        c2 = torch.zeros_like(counts); j._count_uses[grid](index, c2, arrival, rows, rows, USES=uses); e2 = c2.cumsum(0, dtype=torch.int32)
        attempt(copy, 1, lambda: j._place_uses[grid](index, e2, c2, arrival, order2, rows, rows, USES=uses), op="place", uses=uses)
        attempt(copy, 1, lambda: j._rank_uses[grid](index, e2, c2, order2, ranked, rows, rows, USES=uses), op="rank", uses=uses)

def bmm(copy, only):
    from opengem.kernels.jagged_ops import triton as j
    from benchmarks.kernels import jagged as b
    x, off, w = b.make_product("cuda", 0); x, w = x.detach(), w.detach()
    rows, (B, K, N) = x.shape[0], w.shape
    out, g = torch.empty(rows, N, device="cuda", dtype=KIND), normal(rows, N)
    moved = rows * (K + N) * 2 + B * K * N * 2
    def fwd(x, w, out, bm, bn, bk, warps, st):
        inner, cols = w.shape[1:]
        j._bmm[((rows // bm + B) * triton.cdiv(cols, bn),)](x, w, off, out, rows, B, inner, cols, *w.stride(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=st)
    def short(x, w, out, bm, bn, bk, warps, st):
        inner, cols = w.shape[1:]
        j._bmm_short[(rows // bm + B,)](x, w, off, out, rows, B, inner, cols, *w.stride(), BM=bm, BN=bn, BK=bk, STAGES=st, num_warps=warps)
    for c in ((128,128,64,8,3),(128,128,64,8,2),(64,128,64,4,3),(128,128,32,8,4)):
        attempt(copy, moved, lambda: fwd(x, w, out, *c), op="bmm", c=c)
    gx, wt = torch.empty_like(x), w.transpose(1, 2)
    for c in ((128,128,128,8,2),(128,128,128,8,3),(128,64,128,8,3),(64,128,128,4,2),(64,128,128,4,3),(128,64,128,4,3),(128,64,128,8,2)):
        attempt(copy, moved, lambda: short(g, wt, gx, *c), op="bmm_short", c=c)
    from benchmarks.kernels.jagged import grouped_product, sizes
    row = int(sizes()[:576].sum())
    attempt(copy, moved, lambda: grouped_product(x, off, w, 576, row), op="grouped_mm_fwd")

def host(copy, only):
    import time
    from opengem.kernels import (apply_rope, block_attention, broadcast_add, concat_jagged, gather_rows, jagged_dense_bmm,
        jagged_to_padded, layer_norm, padded_to_jagged, quantize_mx, rms_norm, swiglu)
    n = 640
    off = starts([100, 0, 540]); tab = rope_tables(1024, 64, device=DEVICE)
    q, k, v = (normal(n, 2, 64, grad=True) for _ in range(3))
    x, r = normal(n, 256, grad=True), normal(n, 256, grad=True)
    w, d, index = torch.randn(256, device=DEVICE).requires_grad_(), normal(3, 256, grad=True), torch.randint(0, n, (n,), device=DEVICE)
    dense, pad = normal(3, 256, 64, grad=True), normal(3, 540, 256, grad=True)
    calls = {"block": (lambda: block_attention(q, k, v, off, max_length=540), (q, k, v)),
        "block_rope": (lambda: block_attention(q, k, v, off, max_length=540, rope=tab), (q, k, v)),
        "rope": (lambda: apply_rope(q, off, *tab, max_length=540), (q,)),
        "rms": (lambda: rms_norm(x, w), (x, w)), "rms_residual": (lambda: rms_norm(x, w, residual=r)[0], (x, w, r)),
        "layer": (lambda: layer_norm(x, w, w), (x, w)), "rms_quantize": (lambda: rms_norm(x, w, quantize="e4m3").anchor, (x, w)),
        "quantize": (lambda: quantize_mx(x).anchor, (x,)), "swiglu": (lambda: swiglu(x), (x,)),
        "pad": (lambda: jagged_to_padded(x, off, 540), (x,)), "unpad": (lambda: padded_to_jagged(pad, off, n), (pad,)),
        "concat": (lambda: concat_jagged(x, r, off, off)[0], (x, r)), "gather": (lambda: gather_rows(x, index), (x,)),
        "add": (lambda: broadcast_add(x, d, off), (x, d)), "bmm": (lambda: jagged_dense_bmm(x, dense, off, max_length=540), (x, dense))}
    for name, (call, leaves) in calls.items():
        def clock(f, count=200):
            for _ in range(20): f()
            torch.cuda.synchronize(); a = time.perf_counter()
            for _ in range(count): f()
            b = time.perf_counter(); torch.cuda.synchronize()
            return round((b - a) / count * 1e6, 1)
        out = call(); grad = torch.randn_like(out)
        with torch.no_grad(): fwd = clock(call)
        say(op=name, fwd_us=fwd, fwd_graph_us=clock(call), bwd_us=clock(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)))

torch.manual_seed(0)
copy = 4275.0 if WARM else m.copy_gbs()
for section in sys.argv[1].split("+"):
    say(section=section, copy=copy)
    sys.argv[1] = section
    globals()[section.partition(":")[0]](copy, "")
    torch.cuda.empty_cache()
