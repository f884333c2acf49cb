"""Block attention against a per-sample fp64 loop."""

import pytest
import torch

from opengem.kernels.block import cost, reference
from opengem.kernels.block.op import block_attention, pack_angles
from opengem.kernels.rope.op import apply_rope, rope_tables
from tests.kernels.grid import LENGTHS, fused_views, offsets

SAME = [name for name, (_, keys) in LENGTHS.items() if keys is None]


def rotated(x, interleaved, cos, sin):
    """`x` `[L, H, D]` of one sample turned pair by pair, each as one complex product."""
    half = x.shape[-1] // 2
    angle = torch.complex(cos.double(), sin.double())[: x.shape[0], None]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(first, second) * angle
    out = torch.empty_like(x)
    if interleaved:
        out[..., ::2], out[..., 1::2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half:] = turned.real, turned.imag
    return out


def naive(q, k, v, lengths, block, scale, rope=None):
    """The definition, one sample and one block at a time, in fp64."""
    outs, start = [(q[:0] + k[:0] + v[:0]).double()], 0
    for length in lengths:
        part = [x[start : start + length].double() for x in (q, k, v)]
        if rope is not None:
            part[:2] = [rotated(x, rope[2], rope[0], rope[1]) for x in part[:2]]
        for first in range(0, length, block):
            tq, tk, tv = (x[first : first + block].transpose(0, 1) for x in part)
            outs.append(((tq @ tk.mT * scale).softmax(-1) @ tv).transpose(0, 1))
        start += length
    return torch.cat(outs)


@pytest.mark.parametrize("rotation", [None, False, True])
@pytest.mark.parametrize("name", SAME)
def test_forward_and_backward_match_the_definition(name, rotation, poisoned_empty):
    lengths = LENGTHS[name][0]
    views = fused_views(sum(lengths), 3, 16)
    rope = None if rotation is None else (*rope_tables(800, 16), rotation)
    leaves = [x.detach().clone().requires_grad_() for x in views]
    exact = naive(*leaves, lengths, 64, 16**-0.5, rope)
    strided = [x.detach().requires_grad_() for x in views]
    out = block_attention(*strided, offsets(lengths), max_length=max(lengths, default=0), rope=rope)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, strided, weight)
    for a, b in zip(got, torch.autograd.grad(exact, leaves, weight.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block", "dtype"), [(1, torch.int64), (16, torch.int32), (100, torch.int64)])
def test_other_blocks_scale_and_offset_dtypes(block, dtype):
    lengths = [5, 0, 130]
    q, k, v = fused_views(135, 2, 8)
    out = block_attention(q, k, v, offsets(lengths, dtype=dtype), max_length=200, block=block, scale=0.7)
    torch.testing.assert_close(out.double(), naive(q, k, v, lengths, block, 0.7), rtol=1e-5, atol=1e-5)


def test_gradcheck_with_and_without_rope():
    q, k, v = (x.double().requires_grad_() for x in fused_views(4, 1, 4))
    tables = rope_tables(8, 4)
    for rope in (None, (*tables, False), (*tables, True)):
        def run(*qkv, rope=rope):
            return block_attention(*qkv, offsets([3, 0, 1]), max_length=4, block=2, rope=rope)
        assert torch.autograd.gradcheck(run, (q, k, v))


def test_fused_rope_equals_the_pair():
    lengths = [100, 3]
    q, k, v = fused_views(103, 2, 16)
    cos, sin = rope_tables(500, 16)
    fused = block_attention(q, k, v, offsets(lengths), max_length=100, rope=(cos, sin))
    pair = [apply_rope(x, offsets(lengths), cos, sin) for x in (q, k)]
    torch.testing.assert_close(fused, block_attention(*pair, v, offsets(lengths), max_length=100))


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_by_row_are_those_of_its_position_where_tables_say_so(interleaved):
    lengths = [100, 0, 3]
    leaves = [x.detach().requires_grad_() for x in fused_views(103, 2, 16)]
    cos, sin = rope_tables(500, 16)
    position = torch.cat([torch.arange(n) for n in lengths])

    def run(*rope, **options):
        out = block_attention(*leaves, offsets(lengths), max_length=100, rope=rope, **options)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    by_row = run(cos[position], sin[position], interleaved, rope_by_row=True)
    for got, wanted in zip(by_row, run(cos, sin, interleaved), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("by_row", [False, True])
def test_packed_angles_are_angles_in_half_precision(by_row):
    lengths = [100, 0, 3]
    leaves = [x.detach().requires_grad_() for x in fused_views(103, 2, 16)]
    rounded = [x.half().float() for x in rope_tables(103, 16)]

    def run(rope):
        out = block_attention(*leaves, offsets(lengths), max_length=100, rope=rope, rope_by_row=by_row)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    for got, wanted in zip(run(pack_angles(*rounded)), run(tuple(rounded)), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match=r"int32, at least .*make them with pack_angles"):
        run(pack_angles(*rounded)[:50])


def test_a_sample_never_sees_its_batch_mates_or_other_blocks():
    q, k, v = fused_views(140, 1, 8)
    whole = block_attention(q, k, v, offsets([70, 70]), max_length=128)
    alone = block_attention(q[70:], k[70:], v[70:], offsets([70]), max_length=70)
    torch.testing.assert_close(whole[70:], alone)
    changed = block_attention(q, k.index_fill(0, torch.tensor([3]), 9.0), v, offsets([70, 70]), max_length=128)
    assert torch.equal(changed[64:], whole[64:]) and not torch.equal(changed[:64], whole[:64])


def test_bf16_keeps_dtype_and_computes_in_fp32():
    q, k, v = (x.bfloat16() for x in fused_views(90, 2, 32))
    out = block_attention(q, k, v, offsets([90]), max_length=90)
    exact = naive(q, k, v, [90], 64, 32**-0.5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact.bfloat16().double(), rtol=1e-2, atol=1e-3)


def test_tiles_cover_every_row_once():
    lengths = [0, 1, 64, 65, 127, 0, 200]
    first, live, position = reference.tiles(offsets(lengths), sum(lengths), 64)
    rows = torch.cat([torch.arange(int(a), int(a + n)) for a, n in zip(first, live, strict=True)])
    assert torch.equal(rows, torch.arange(sum(lengths)))
    assert bool((position % 64 == 0).all())


def test_chunks_of_tiles_do_not_change_the_result(monkeypatch):
    q, k, v = fused_views(300, 1, 8)
    whole = block_attention(q, k, v, offsets([300]), max_length=300)
    monkeypatch.setitem(reference.SCORE_ELEMENTS, "cpu", 1)
    torch.testing.assert_close(block_attention(q, k, v, offsets([300]), max_length=300), whole)


@pytest.mark.parametrize(
    "break_it", ["rank", "heads", "dtype", "block", "offsets", "length", "short", "tables", "rows", "fp16"])
def test_errors_name_the_argument(break_it):
    q, k, v = fused_views(6, 2, 8)
    cos, sin = rope_tables(6, 8)
    arguments = {"q": q, "k": k, "v": v, "offsets": offsets([6]), "max_length": 6}
    change, message = {
        "rank": ({"q": q[0], "k": k[0], "v": v[0]}, r"\[T, H, D\]"),
        "heads": ({"k": k[:, :1]}, "share one shape"),
        "dtype": ({"v": v.double()}, "v is torch.float64"),
        "block": ({"block": 0}, "block must be at least 1"),
        "offsets": ({"offsets": offsets([4])}, "offsets run from 0 to 4"),
        "length": ({"max_length": 5}, "more than max_length 5"),
        "short": ({"rope": (cos[:5], sin[:5])}, "5 positions, the longest sample may have 6"),
        "tables": ({"rope": (cos[:, :2], sin[:, :2])}, "D = 8"),
        "rows": ({"rope": rope_tables(7, 8), "rope_by_row": True}, "needs 6 rows"),
        "fp16": ({"rope": (cos.half(), sin.half())}, "must be float32"),
    }[break_it]
    with pytest.raises(ValueError, match=message):
        block_attention(**(arguments | change))


def test_opcheck_compile_and_flop_count():
    q, k, v = (x.detach().clone().requires_grad_() for x in fused_views(70, 2, 8))
    cos, sin = rope_tables(70, 8)
    raw = (q, k, v, offsets([66, 4]), cos, sin, 70, 64, 0.5, False, False)
    torch.library.opcheck(torch.ops.opengem.block_fwd, raw)

    def run(*qkv):
        return block_attention(*qkv, raw[3], max_length=70, rope=(cos, sin))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        run(q, k, v).sum().backward()
    assert counter.get_total_flops() == 3 * 4 * 2 * 8 * (64**2 + 2**2 + 4**2)


def test_cost_counts_the_mask():
    for lengths in ([], [0], [63, 64, 65], [1, 700]):
        brute = sum(int(i // 64 == j // 64) for n in lengths for i in range(n) for j in range(n))
        assert cost.pairs(torch.tensor(lengths, dtype=torch.int64)) == brute
    assert cost.flops([3], 2, 8) == 4 * 2 * 8 * 9
    assert cost.bytes(10, 2, 8) == 4 * 10 * 2 * 8 * 2
    assert cost.backward_bytes(10, 2, 8, positions=5) == 7 * 10 * 2 * 8 * 2 + 2 * 5 * 4 * 4
