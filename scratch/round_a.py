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
    OUT.write(json.dumps({"section": sys.argv[1], **line}) + "\n"); OUT.flush()
def attempt(copy, moved, run, **line):
    try:
        say(**line, **m.speed(run, moved, copy))
    except Exception as e:
        say(**line, error=repr(e)[:300])

def block(copy, only):
    lens = make_lengths().tolist(); rows, off = sum(lens), starts(lens)
    for dim in (128, 64):
        q, k, v, g = (normal(rows, HEADS, dim) for _ in range(4))
        tab = rope_tables(LONGEST, dim, device=DEVICE)
        none = (q.new_empty(0, dim // 2, dtype=torch.float32),) * 2
        for direction in ("forward", "backward"):
            if only and direction != only.split("/")[0]: continue
            moved = bc.bytes(rows, HEADS, dim) if direction == "forward" else bc.backward_bytes(rows, HEADS, dim)
            for impl in ("block_old", "new", "block_loop", "block_v1", "block_v2", "block_v3"):
                if "/" in only and impl not in only.split("/")[1].split("+"): continue
                if impl == "block_loop" and (direction == "backward" or dim == 64): continue
                if impl[:7] == "block_v" and (direction == "forward" or dim == 64): continue
                mod = importlib.import_module("opengem.kernels.block.triton" if impl == "new" else f"scratch.{impl}")
                for rope in (None, False, True):
                    if dim == 64 and rope: continue
                    if impl == "block_old" and (rope or dim == 64): continue
                    if impl[:7] == "block_v" and rope is not False: continue
                    for reg in (128, 168, None) if dim == 128 else (128,):
                        if impl == "block_old" and reg is None: continue
                        for share in ((4, 2) if impl == "block_loop" else (1,)):
                            if impl == "block_loop":
                                if reg is None: continue
                                mod.SHARE = share
                            if impl == "new": mod.REGISTERS[direction, dim] = reg
                            else: mod.CONFIGS[direction, dim, rope is not None] = {"num_warps": 4} | ({"maxnreg": reg} if reg else {})
                            t = none if rope is None else tab
                            tail = (off, *t, LONGEST, 64, dim ** -0.5, bool(rope))
                            run = (lambda: mod.block_forward(q, k, v, *tail)) if direction == "forward" else (lambda: mod.block_backward(g, q, k, v, *tail))
                            attempt(copy, moved, run, direction=direction, dim=dim, impl=impl, rope=rope, reg=reg, share=share)

def gluon(copy, only):
    import scratch.block_gluon as gmod
    from opengem.kernels.block import triton as tmod
    if only == "check":
        for dim in (64, 128):
            for rope in (False, True):
                for lens in m.EDGES[3:] + ([64] * 3, [200, 64, 0, 1000, 17]):
                    rows, off = sum(lens), starts(list(lens))
                    if rows == 0: continue
                    q, k, v, g = (normal(rows, 3, dim) for _ in range(4))
                    tab = rope_tables(1100, dim, device=DEVICE) if rope else (q.new_empty(0, dim // 2, dtype=torch.float32),) * 2
                    tail = (off, *tab, 1024, 64, dim ** -0.5, False)
                    want = [tmod.block_forward(q, k, v, *tail), *tmod.block_backward(g, q, k, v, *tail)]
                    gmod.HEADS = True
                    gmod.REGISTERS["forward"] = None
                    got = gmod.block_forward(q, k, v, *tail)
                    torch.cuda.synchronize()
                    say(dim=dim, rope=rope, lens=list(lens), heads_gap=float((got.float() - want[0].float()).abs().max()))
                    gmod.HEADS = False
                    gmod.REGISTERS["forward"] = 128
                    for mode in ((False, False), (False, True), (True, False), (True, True)):
                        gmod.MODE["backward"] = mode
                        try:
                            got = [gmod.block_forward(q, k, v, *tail), *gmod.block_backward(g, q, k, v, *tail)]
                            torch.cuda.synchronize()
                            say(dim=dim, rope=rope, lens=list(lens), mode=mode, gap=[round(float((a.float() - b.float()).abs().max()), 4) for a, b in zip(got, want)])
                        except Exception as e:
                            say(dim=dim, rope=rope, lens=list(lens), mode=mode, error=repr(e)[:300]); return
        return
    lens = make_lengths().tolist(); rows, off = sum(lens), starts(lens)
    for dim in (128, 64):
        q, k, v, g = (normal(rows, HEADS, dim) for _ in range(4))
        for rope in (False, True):
            tab = rope_tables(LONGEST, dim, device=DEVICE) if rope else (q.new_empty(0, dim // 2, dtype=torch.float32),) * 2
            tail = (off, *tab, LONGEST, 64, dim ** -0.5, False)
            gmod.HEADS = True
            gmod.REGISTERS["forward"] = None
            attempt(copy, bc.bytes(rows, HEADS, dim), lambda: gmod.block_forward(q, k, v, *tail), impl="gluon_heads", direction="forward", dim=dim, rope=rope)
            gmod.HEADS = False
            for reg in (None, 128):
                gmod.REGISTERS["forward"] = reg
                attempt(copy, bc.bytes(rows, HEADS, dim), lambda: gmod.block_forward(q, k, v, *tail), impl="gluon", direction="forward", dim=dim, rope=rope, reg=reg)
            for mode, reg in (((False, False), 168), ((False, True), 168), ((True, False), 168), ((True, True), 168), ((True, False), None)):
                if dim == 64: reg = 128
                if not rope and mode[1]: continue
                gmod.MODE["backward"], gmod.REGISTERS["backward"] = mode, reg
                attempt(copy, bc.backward_bytes(rows, HEADS, dim), lambda: gmod.block_backward(g, q, k, v, *tail), impl="gluon", direction="backward", dim=dim, rope=rope, reg=reg, mode=mode)

def norm(copy, only):
    from opengem.kernels.norm import triton as n
    from opengem.kernels.norm.op import rms_norm
    for width in (256, 512, 1024, 2048, 4096):
        rows = (1 << 28) // width
        x, w, size = normal(rows, width), torch.randn(width, device=DEVICE), 2 << 28
        r = normal(rows, width)
        for a in ((2, 3, 4) if width <= 1024 else (256, 512, 1024)):
            if width <= 1024: n.QUANTIZED_STAGES = a
            else: n.QUANTIZED_CHUNK = a
            attempt(copy, size + size // 2, lambda: rms_norm(x, w, quantize="e4m3"), op="rms_quantize", width=width, option=a)
        n.QUANTIZED_STAGES = 3
        if width <= 1024:
            attempt(copy, 3 * size + size // 2, lambda: rms_norm(x, w, residual=r, quantize="e4m3"), op="rms_res_quantize", width=width)

def sums(copy, only):
    from opengem.kernels.jagged_ops import triton as j
    from benchmarks.kernels import jagged as b
    x, off = b.make_values("cuda", 0); x = x.detach()
    rows, width = x.shape
    for cols in (64, 128, 256):
        for tile in (4096, 8192):
            for st in (1, 3, 4):
                j.SUM_COLUMNS, j.SUM_TILE, j.SUM_STAGES = cols, tile, st
                attempt(copy, (rows + b.SAMPLES) * 1024, lambda: j.segment_sum(x, off), op="segment_sum", cols=cols, tile=tile, stages=st)
    index = torch.randperm(rows, device="cuda")
    for tile in (4096, 8192):
        j.SUM_TILE = tile
        attempt(copy, 2 * rows * 1024, lambda: j.gather_rows_backward(x, index, rows), op="gather_bwd", tile=tile)
    counts = torch.ones(rows, dtype=torch.int32, device="cuda"); ends = counts.cumsum(0, dtype=torch.int32)
    order = index.int()
    for tile in (2048, 4096, 8192):
        out = torch.empty_like(x); t = {'ROWS': tile // 512, 'COLUMNS': 512}; grid = (triton.cdiv(rows, tile // 512),)
        attempt(copy, 2 * rows * 1024, lambda: j._sum_uses[grid](x, order, ends, counts, out, rows, width, **t), op="sum_uses_only", tile=tile)
    attempt(copy, 1, lambda: torch.sort(order, stable=True), op="sort")
    attempt(copy, 1, lambda: counts.cumsum(0, dtype=torch.int32), op="cumsum")
    arrival = torch.empty_like(order)
    attempt(copy, 1, lambda: j._count_uses[(triton.cdiv(rows, 512),)](index, counts, arrival, rows, rows, USES=512), op="count_uses")

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
    for c in ((128,128,64,8,3),(128,128,64,8,4),(256,128,64,8,3),(256,128,64,8,4),(128,128,64,4,4),(128,128,128,8,2),(64,128,64,4,4)):
        attempt(copy, moved, lambda: fwd(x, w, out, *c), op="bmm", c=c)
    gx, wt = torch.empty_like(x), w.transpose(1, 2)
    for c in ((128,128,64,8,3),(128,128,64,8,2),(128,256,64,8,2),(128,128,128,8,1),(64,256,64,8,2),(64,512,64,8,2),(64,128,128,4,1)):
        attempt(copy, moved, lambda: fwd(g, wt, gx, *c), op="bmm_grad_values", c=c)
    gw = torch.empty_like(w)
    def bwd(bm, bn, bk, warps, st):
        j._bmm_backward[(B * triton.cdiv(N, bn) * triton.cdiv(K, bk),)](g, x, off, gw, K, N, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=st)
    for c in ((64,128,128,8,3),(64,128,128,8,4),(64,128,256,8,3),(64,128,256,8,4),(128,128,128,8,3),(64,128,128,4,4)):
        attempt(copy, moved, lambda: bwd(*c), op="bmm_grad_dense", c=c)

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

name = sys.argv[1]
torch.manual_seed(0)
copy = 4275.0 if WARM or name == 'host' else m.copy_gbs()
say(copy=copy)
f, _, only = name.partition(":")
globals()[f](copy, only)
