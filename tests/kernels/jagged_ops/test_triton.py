"""The jagged kernels against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.jagged_ops import op
from tests.kernels.aot import compile_ahead
from tests.kernels.grid import LENGTHS, case, offsets
from tests.kernels.interpret import DEVICE, DTYPES, GPU, close_to, needs_kernels

NAMES = list(LENGTHS) if GPU else ["empty_batch", "all_empty", "zero_q", "zero_kv", "zero_between", "tile_edges_64"]
WIDTHS = [1, 96, 256, 1500] if GPU else [12]


def run(kind, call, leaves, dtype=None):
    """Outputs and gradients of one implementation; seeds are rounded to `dtype`, by default that of the leaves."""
    inputs = [x.detach().requires_grad_() for x in leaves]
    with backend.force(kind):
        outs = call(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(1)
        seeds = [torch.randn(o.shape, device=DEVICE).to(dtype or o.dtype).to(o.dtype) for o in outs]
        return [*outs, *torch.autograd.grad(outs, inputs, seeds)]


def rows(count, *tail, dtype):
    return torch.randn(count, *tail, device=DEVICE).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_copies_have_the_bits_of_the_reference(name, width, dtype, poisoned_empty):
    lengths, others = case(name)
    starts, more = offsets(lengths, DEVICE), offsets(others, DEVICE)
    x, y = rows(sum(lengths), width, dtype=dtype), rows(sum(others), width, dtype=dtype)
    size, total = max(lengths, default=0) + 1, sum(lengths)
    padded = rows(len(lengths), size, width, dtype=dtype)
    for call, leaves in [
        (lambda x: op.jagged_to_padded(x, starts, size, fill=3.0), [x]),
        (lambda p: op.padded_to_jagged(p, starts, total), [padded]),
        (lambda x, y: op.concat_jagged(x, y, starts, more)[0], [x, y]),
        (lambda z: op.split_jagged(z, starts, more, total), [torch.cat([x, y])]),
    ]:
        for a, b in zip(run("triton", call, leaves), run("reference", call, leaves), strict=True):
            assert torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_sums_and_products_match_the_reference(name, width, dtype, poisoned_empty):
    lengths = case(name)[0]
    starts, batch, size = offsets(lengths, DEVICE), len(lengths), max(lengths, default=0)
    x, dense = rows(sum(lengths), width, dtype=dtype), rows(batch, width, dtype=dtype)
    weight = rows(batch, width, 24, dtype=dtype)
    index = torch.randint(0, max(1, sum(lengths)), (3 * sum(lengths),), device=DEVICE)
    for call, leaves in [
        (lambda x, d: op.broadcast_add(x, d, starts), [x, dense]),
        (lambda x: op.gather_rows(x, index), [x]),
        (lambda x, w: op.jagged_dense_bmm(x, w, starts, max_length=size), [x, weight]),
    ]:
        got, plain = (run(kind, call, leaves) for kind in ("triton", "reference"))
        exact = run("reference", call, [leaf.double() for leaf in leaves], dtype)
        for triple in zip(got, exact, plain, strict=True):
            close_to(*triple)


@pytest.mark.gpu
def test_rows_behind_the_end_bad_indices_and_truncation(poisoned_empty):
    x = rows(10, 64, dtype=torch.bfloat16)
    starts = offsets([3, 4], DEVICE)
    assert bool((op.padded_to_jagged(rows(2, 4, 64, dtype=torch.bfloat16), starts, 10)[7:] == 0).all())
    assert torch.equal(op.broadcast_add(x, rows(2, 64, dtype=torch.bfloat16), starts)[7:], x[7:])
    assert torch.equal(op.jagged_to_padded(x, starts, 2)[1], x[3:5])
    leaf = x.clone().requires_grad_()
    out = op.gather_rows(leaf, torch.tensor([-1, 10, 3, 1 << 40], device=DEVICE))
    assert bool((out[[0, 1, 3]] == 0).all()) and torch.equal(out[2], x[3])
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert bool((grad[3] == 1).all()) and float(grad.float().sum()) == 64


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gradient_of_a_row_used_often_sums_its_uses_in_order(dtype):
    """Uses arrive in any order; ranking them makes the sum that of ascending uses, whatever the row's popularity."""
    index = torch.cat([torch.full((300,), 5), torch.arange(40), torch.full((300,), 5)]).to(DEVICE, dtype)
    grad = rows(640, 8, dtype=DTYPES[0])
    out = op.gather_rows(rows(64, 8, dtype=DTYPES[0]), index)
    assert out.shape == (640, 8)
    with backend.force("triton"):
        got = op._gather_bwd(grad, index, 64)
    uses = (index.long() == 5).nonzero()[:, 0]
    want = torch.zeros(8, device=DEVICE)
    for use in uses.tolist():
        want += grad[use].float()
    assert torch.equal(got[5], want.to(DTYPES[0])) and torch.equal(got[:5], grad[300:305])
    assert bool((got[40:] == 0).all())


@pytest.mark.gpu
def test_padding_beyond_2_to_the_31_elements():
    """(B - 1) * L * D above 2^31: the last sample still lands in its place."""
    lengths = [4, 0, 5]
    x = rows(9, 1024, dtype=torch.bfloat16)
    out = op.jagged_to_padded(x, offsets(lengths, DEVICE), 1_100_000)
    assert torch.equal(out[2, :5], x[4:]) and float(out[2, 5:100].abs().sum()) == 0
    assert torch.equal(op.padded_to_jagged(out, offsets(lengths, DEVICE), 9), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_take_the_reference(dtype):
    """fp32 and fp64 rows on a GPU run the reference unless a test forces the kernel."""
    x, starts = rows(10, 64, dtype=dtype), offsets([3, 7], DEVICE)
    weight = rows(2, 64, 24, dtype=dtype)
    got = op.jagged_dense_bmm(x, weight, starts, max_length=7)
    torch.testing.assert_close(got, torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]]), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_same_bits_every_run_and_no_sync():
    x, index = rows(500, 128, dtype=torch.bfloat16), torch.randint(0, 500, (4000,), device=DEVICE)
    starts = offsets([100, 0, 400], DEVICE)
    calls = [(lambda x: op.gather_rows(x, index), [x]),
             (lambda x, d: op.broadcast_add(x, d, starts), [x, rows(3, 128, dtype=torch.bfloat16)])]
    for call, leaves in calls:
        first, second = (run("triton", call, leaves) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        leaf = [x.detach().requires_grad_() for x in leaves]
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(*leaf).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("columns", [64, 128])
def test_sum_of_uses_compiles_ahead_of_time(columns):
    """With the mask built from the loop counter Triton 3.6 and 3.7 could not compile these tiles."""
    pytest.importorskip("triton")
    types = dict.fromkeys(("grad", "out"), "*bf16") | {"ranked": "*i32", "firsts": "*i32", "seen": "*i64"}
    found = compile_ahead(
        "opengem.kernels.jagged_ops.triton:_sum_uses", types | dict.fromkeys(("rows", "width"), "i32"),
        {"ROWS": 4096 // columns, "COLUMNS": columns}, aligned=("width",), num_warps=4, num_stages=3)
    assert found["spill_bytes"] == 0
