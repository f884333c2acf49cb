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

def gnorm(copy, only):
    import scratch.gluon_norm as g
    from opengem.kernels.norm import triton as n
    from opengem.kernels.norm.op import rms_norm, layer_norm
    def run(x, w, b, centered):
        rows, width = x.shape
        outs = (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((-(-rows // 32), width // 32), dtype=torch.uint8),
                x.new_empty(rows if centered else 0, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32))
        g.norm_quantize_forward(x, w, b, 1e-5, centered, outs)
        return outs
    for reg in (None, 80):
        g.REGISTERS = reg
        for width in (128, 256, 512, 1024):
            for rows, bias, centered in ((1, False, False), (33, True, True), (1000, True, False), (4133, False, True)):
                x, w, b = normal(rows, width) * 3, torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)
                b = b if bias else None
                got = run(x, w, b, centered)
                data, scale, _, mean, rstd = n.norm_quantize_forward(x, None, w, b, 1e-5, centered)
                torch.cuda.synchronize()
                say(check="gluon_norm", reg=reg, width=width, rows=rows, bias=bias, centered=centered,
                    data=float((got[0].view(torch.uint8) != data.view(torch.uint8)).double().mean()),
                    scale=float((got[1] != scale).double().mean()), rstd=float((got[3] - rstd).abs().max()),
                    mean=float((got[2] - mean).abs().max()) if centered else 0)
    size = 2 << 28
    for width in (128, 256, 512, 1024):
        x, w = normal((1 << 28) // width, width), torch.randn(width, device=DEVICE)
        for reg in (None, 96, 80):
            g.REGISTERS = reg
            attempt(copy, size + size // 2, lambda: run(x, w, None, False), op="gluon_rms_quantize", width=width, reg=reg)
        attempt(copy, size + size // 2, lambda: rms_norm(x, w, quantize="e4m3"), op="rms_quantize", width=width)
        g.REGISTERS = None
        attempt(copy, size + size // 2, lambda: run(x, w, None, True), op="gluon_layer_quantize", width=width)
        attempt(copy, size + size // 2, lambda: layer_norm(x, w, quantize="e4m3"), op="layer_quantize", width=width)

def bmm(copy, only):
    from opengem.kernels.jagged_ops import triton as j
    from benchmarks.kernels import jagged as b
    x, off, w = b.make_product("cuda", 0); x, w = x.detach(), w.detach()
    rows, (B, K, N) = x.shape[0], w.shape
    g = normal(rows, N)
    moved = rows * (K + N) * 2 + B * K * N * 2
    def short(x, w, out, bm, bn, bk, warps, st):
        inner, cols = w.shape[1:]
        j._bmm_short[(rows // bm + B,)](x, w, off, out, rows, B, inner, cols, *w.stride(), BM=bm, BN=bn, BK=bk, STAGES=st, num_warps=warps)
    gx, wt = torch.empty_like(x), w.transpose(1, 2)
    for c in ((128,64,128,8,3),(128,64,128,8,4),(64,64,128,4,3),(64,64,128,4,4),(128,32,128,4,3)):
        attempt(copy, moved, lambda: short(g, wt, gx, *c), op="bmm_short", c=c)
    index = torch.randperm(rows, device="cuda")
    attempt(copy, 2 * rows * 1024, lambda: j.gather_rows_backward(x, index, rows), op="gather_bwd")

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
            return (b - a) / count * 1e6
        def clock(f, once=clock): return round(min(once(f, 25) for _ in range(12)), 1)
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
