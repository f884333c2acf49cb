"""The block attention kernels against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32.

On a GPU both are tested against it, and what holds for one kernel alone is shown of the one that runs there."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.block.op import block_attention, pack_angles
from opengem.kernels.rope.op import apply_rope, rope_tables
from tests.kernels.aot import assert_barriers_apart, assert_on_tensor_cores, compile_ahead
from tests.kernels.block.test_op import SAME, naive
from tests.kernels.grid import LENGTHS, fused_views, offsets
from tests.kernels.interpret import DEVICE, DTYPES, GPU, capture, close_to, needs_kernels

BEST = "gluon" if GPU and torch.cuda.get_device_capability() == (9, 0) else "triton"
KINDS = sorted({BEST, "triton"})


def tables(rotation, dim, positions=800):
    """rope argument; the kernel reads the tables in fp16, so where tests compare in fp32 they hold fp16 numbers."""
    if rotation is None:
        return None
    exact = rope_tables(positions, dim, device=DEVICE)
    return (*(exact if GPU else (x.half().float() for x in exact)), rotation)


def run(kind, views, lengths, seed, rope, max_length=None, by_row=False):
    """(output, gradients) of one implementation on strided views."""
    leaves = [x.detach().requires_grad_() for x in views]
    with backend.force(kind):
        out = block_attention(*leaves, offsets(lengths, DEVICE), max_length=max_length or max(lengths, default=0),
                              rope=rope, rope_by_row=by_row)
        return [out, *torch.autograd.grad(out, leaves, seed)]


def step_by_step(views, lengths, seed, rope):
    """(output, gradients) in plain PyTorch, the result of every operation rounded to the dtype of the views."""
    leaves = [x.detach().requires_grad_() for x in views]
    q, k, v = leaves
    if rope is not None:
        with backend.force("reference"):
            q, k = (apply_rope(x, offsets(lengths, DEVICE), *rope[:2], interleaved=rope[2]) for x in (q, k))
    outs, begin = [q[:0] + k[:0] + v[:0]], 0
    for length in lengths:
        for first in range(begin, begin + length, 64):
            tile = slice(first, min(first + 64, begin + length))
            scores = q[tile].transpose(0, 1) @ k[tile].permute(1, 2, 0) * q.shape[2] ** -0.5
            p = torch.softmax(scores.float(), -1).to(q.dtype)
            outs.append((p @ v[tile].transpose(0, 1)).transpose(0, 1))
        begin += length
    with backend.force("reference"):
        return [torch.cat(outs), *torch.autograd.grad(torch.cat(outs), leaves, seed)]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotation", [None, False, True])
@pytest.mark.parametrize("dim", [64, 128] if GPU else [64])
@pytest.mark.parametrize("name", SAME if GPU else ["all_empty", "zero_between", "tile_edges_64"])
def test_matches_the_reference(name, dim, rotation, dtype, poisoned_empty):
    lengths = LENGTHS[name][0]
    heads = 3 if GPU else 1
    views = fused_views(sum(lengths), heads, dim, DEVICE, dtype)
    rope = tables(rotation, dim)
    seed = torch.randn(sum(lengths), heads, dim, device=DEVICE).to(dtype)
    plain = step_by_step(views, lengths, seed, rope)
    exact = run("reference", [x.double() for x in views], lengths, seed.double(), rope)
    for kind in KINDS:
        for triple in zip(run(kind, views, lengths, seed, rope), exact, plain, strict=True):
            close_to(*triple)


@needs_kernels
@pytest.mark.parametrize("rotation", [False, True])
def test_angles_by_row_are_those_of_its_position_where_tables_say_so(rotation):
    lengths = [100, 0, 64, 3] if GPU else [66, 0, 3]
    views = fused_views(sum(lengths), 2 if GPU else 1, 64, DEVICE, DTYPES[0])
    cos, sin, _ = rope = tables(rotation, 64)
    position = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    seed = torch.randn(views[0].shape, device=DEVICE).to(DTYPES[0])
    for kind in KINDS:
        by_row = run(kind, views, lengths, seed, (cos[position], sin[position], rotation), by_row=True)
        for got, wanted in zip(by_row, run(kind, views, lengths, seed, rope), strict=True):
            assert torch.equal(got, wanted)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_packed_angles_are_read_as_the_kernel_packs_them(kind):
    lengths = LENGTHS["zero_between"][0]
    views = fused_views(sum(lengths), 2, 64, dtype=DTYPES[0], device=DEVICE)
    seed, rope = torch.randn_like(views[0].contiguous()), tables(False, 64)
    for got, wanted in zip(run(kind, views, lengths, seed, pack_angles(*rope[:2])),
                           run(kind, views, lengths, seed, rope), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", [None, False, True])
def test_same_bits_every_run_and_whatever_the_batch_mates(rotation):
    lengths = [100, 64, 0, 700, 3]
    views = fused_views(sum(lengths), 4, 128, DEVICE, torch.bfloat16)
    rope = tables(rotation, 128)
    seed = torch.randn(sum(lengths), 4, 128, device=DEVICE).bfloat16()
    first = run(BEST, views, lengths, seed, rope)
    for _ in range(5):
        for a, b in zip(first, run(BEST, views, lengths, seed, rope), strict=True):
            assert torch.equal(a, b)
    alone = run(BEST, [x[164:864] for x in views], [700], seed[164:864], rope)
    for a, b in zip(first, alone, strict=True):
        assert torch.equal(a[164:864], b)


@pytest.mark.gpu
def test_rows_behind_the_last_offset_are_zero(poisoned_empty):
    """Rows past the end of the last sample hold NaN; output and gradients there are zero and nothing else changes."""
    for spare in (1, 63, 64, 200):
        views = [x.clone() for x in fused_views(100 + spare, 2, 64, DEVICE, torch.bfloat16)]
        for x in views:
            x[100:] = float("nan")
        seed = torch.full((100 + spare, 2, 64), float("nan"), device=DEVICE).bfloat16()
        seed[:100] = 1
        padded = run(BEST, views, [70, 30], seed, None)
        exact = run(BEST, [x[:100] for x in views], [70, 30], seed[:100], None)
        for a, b in zip(padded, exact, strict=True):
            assert torch.equal(a[:100], b) and bool((a[100:] == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", [False, True])
def test_positions_up_to_65536(rotation):
    views = fused_views(65_536, 1, 64, DEVICE, torch.bfloat16)
    rope = tables(rotation, 64, 70_000)
    seed = torch.randn(65_536, 1, 64, device=DEVICE).bfloat16()
    got, plain = (run(kind, views, [65_536], seed, rope) for kind in (BEST, "reference"))
    exact = run("reference", [x.double() for x in views], [65_536], seed.double(), rope)
    for triple in zip(got, exact, plain, strict=True):
        close_to(*triple)


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    """A row stride of 2,048 puts row 1,048,577 past 2^31 elements."""
    store = torch.zeros(1_048_704, 2048, device=DEVICE, dtype=torch.bfloat16)
    store[-128:].normal_()
    views = [store[:, i * 128 : (i + 1) * 128].unflatten(1, (2, 64)) for i in range(3)]
    lengths = [1_048_576, 128]
    seed = torch.ones(sum(lengths), 2, 64, device=DEVICE, dtype=torch.bfloat16)
    got = run(BEST, views, lengths, seed, None)
    want = run("reference", [x[-128:] for x in views], [128], seed[-128:], None)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[-128:], b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_no_sync_cuda_graph_and_compile():
    lengths = [100, 64, 0, 70, 3]
    leaves = [x.detach().clone().requires_grad_() for x in fused_views(237, 2, 64, DEVICE, torch.bfloat16)]
    starts, rope = offsets(lengths, DEVICE), rope_tables(128, 64, device=DEVICE)
    seed = torch.randn(237, 2, 64, device=DEVICE).bfloat16()

    def step(*qkv):
        """Detached: a graph kept alive would tie the leaves' gradients to the stream of its first run."""
        out = block_attention(*qkv, starts, max_length=128, rope=rope)
        return [out.detach(), *torch.autograd.grad(out, qkv, seed)]

    want = step(*leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(*leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*leaves)
    torch.cuda.synchronize()
    graph, captured = capture(lambda: step(*leaves))
    graph.replay()
    compiled = torch.compile(lambda *a: block_attention(*a, starts, max_length=128, rope=rope), fullgraph=True)(*leaves)
    for a, b, c in zip(want, again, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert torch.equal(compiled, want[0])


@pytest.mark.gpu
def test_new_batch_sizes_compile_nothing():
    """Token and sample counts are ordinary arguments: 5 batches after a warm-up add no kernel variant."""
    from opengem.kernels.block import gluon_sm90, triton

    kernels = gluon_sm90 if BEST == "gluon" else triton

    def variants():
        return sum(len(cache[0]) for cache in kernels._forward.device_caches.values())

    counts = []
    for lengths in ([64] * 16, [5], [3, 9, 1], [64, 64], [1] * 33, [100] * 7):
        views = fused_views(sum(lengths), 2, 64, DEVICE, torch.bfloat16)
        run(BEST, views, lengths, torch.ones(sum(lengths), 2, 64, device=DEVICE).bfloat16(), None, 128)
        counts.append(variants())
    assert counts[1:] == counts[:1] * 5


@pytest.mark.parametrize(("direction", "dim", "rope", "capability"), [
    ("forward", 128, False, 90), ("forward", 128, True, 90), ("backward", 128, False, 90), ("backward", 128, True, 90),
    ("backward", 64, True, 90), ("backward", 128, False, 100),
])
def test_compiles_ahead_of_time(direction, dim, rope, capability):
    from opengem.kernels.block import triton

    names = ["q", "k", "v", "out"] if direction == "forward" else ["grad", "q", "k", "v", "grad_q", "grad_k", "grad_v"]
    types = {**dict.fromkeys(names, "*bf16"), "place": "*i64", "turns": "*i32", "scale": "fp32"}
    strides = [f"{n}_{s}" for n in ("grad", "q", "k", "v", "out") for s in ("row", "head")]
    strides = strides if direction == "backward" else strides[2:]
    types |= dict.fromkeys([*strides, "positions", "heads"], "i32")
    constants = {"BLOCK": 64, "HALF": dim // 2, "ROPE": rope, "INTERLEAVED": False}
    found = compile_ahead(f"opengem.kernels.block.triton:_{direction}", types, constants, capability=capability,
                          aligned=tuple(strides), num_stages=1, num_warps=4,
                          maxnreg=triton.REGISTERS[direction, dim])
    assert_on_tensor_cores(found)


@pytest.mark.parametrize(("direction", "dim", "rope", "interleaved"), [
    ("forward", 128, False, False), ("forward", 128, True, True), ("forward", 64, True, False),
    ("backward", 128, False, False), ("backward", 128, True, False), ("backward", 64, True, True),
])
def test_gluon_compiles_ahead_of_time(direction, dim, rope, interleaved):
    from opengem.kernels.block import gluon_sm90

    types = {"?_desc": f"bf16[64,{dim // 2}]", "out": "*bf16", "grad_?": "*bf16", "place": "*i64", "turns": "*i32",
             "scale": "fp32", "positions": "i32", "heads": "i32"}
    limit = {"maxnreg": gluon_sm90.REGISTERS[dim]} if direction == "backward" else {}
    found = compile_ahead(f"opengem.kernels.block.gluon_sm90:_{direction}", types,
                          {"HALF": dim // 2, "ROPE": rope, "INTERLEAVED": interleaved}, num_stages=1, num_warps=4,
                          **limit)
    assert_on_tensor_cores(found)
    assert_barriers_apart(found)
    assert found["shared"] <= 227 * 1024 // (3 if direction == "backward" else 4) - 1024


def test_naive_truth_agrees_with_the_reference_on_this_device():
    views = fused_views(70, 2, 64, DEVICE, torch.float32)
    got = block_attention(*views, offsets([70], DEVICE), max_length=70)
    torch.testing.assert_close(got.double(), naive(*views, [70], 64, 0.125), rtol=1e-3, atol=1e-3)
