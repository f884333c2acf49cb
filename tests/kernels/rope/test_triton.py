"""The rotary kernel against the reference: on a GPU in 16 bit, in Triton's interpreter in fp32."""

import pytest
import torch

from opengem.kernels import backend
from opengem.kernels.rope.op import apply_rope, rope_tables
from tests.kernels.grid import LENGTHS, fused_views, offsets
from tests.kernels.interpret import DEVICE, DTYPES, GPU, close_to, needs_kernels
from tests.kernels.rope.test_op import SAME


def run(kind, x, lengths, seed, interleaved, positions=800):
    x = x.detach().requires_grad_()
    tables = rope_tables(positions, x.shape[2], device=DEVICE)
    with backend.force(kind):
        out = apply_rope(x, offsets(lengths, DEVICE), *tables, interleaved=interleaved)
        return [out, *torch.autograd.grad(out, x, seed)]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 128), (16, 32)] if GPU else [(3, 16)])
@pytest.mark.parametrize("name", SAME)
def test_matches_the_reference(name, heads, dim, interleaved, dtype, poisoned_empty):
    lengths = LENGTHS[name][0]
    x = fused_views(sum(lengths), heads, dim, DEVICE, dtype)[1]
    seed = torch.randn(sum(lengths), heads, dim, device=DEVICE).to(dtype)
    got, plain = (run(kind, x, lengths, seed, interleaved) for kind in ("triton", "reference"))
    for triple in zip(got, run("reference", x.double(), lengths, seed.double(), interleaved), plain, strict=True):
        close_to(*triple)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
def test_position_65535_and_the_same_bits_every_run(interleaved):
    x = torch.randn(65_536, 2, 64, device=DEVICE).bfloat16()
    got = run("triton", x, [65_536], x, interleaved, 65_600)
    exact = run("reference", x.double(), [65_536], x.double(), interleaved, 65_600)
    plain = run("reference", x, [65_536], x, interleaved, 65_600)
    for triple in zip(got, exact, plain, strict=True):
        close_to(*triple)
    for a, b in zip(got, run("triton", x, [65_536], x, interleaved, 65_600), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_rows_behind_the_end_and_rows_beyond_2_to_the_31_elements(poisoned_empty):
    x = torch.full((40, 2, 64), float("nan"), device=DEVICE).bfloat16()
    x[:30] = 1
    tables = rope_tables(64, 64, device=DEVICE)
    assert bool((apply_rope(x, offsets([30], DEVICE), *tables)[30:] == 0).all())
    store = torch.zeros(1_048_704, 2048, device=DEVICE, dtype=torch.bfloat16)
    store[-64:].normal_()
    view = store[:, :128].unflatten(1, (2, 64))
    got = apply_rope(view, offsets([1_048_640, 64], DEVICE), *rope_tables(1_048_640, 64, device=DEVICE))
    assert torch.equal(got[-64:], apply_rope(view[-64:], offsets([64], DEVICE), *tables))


@pytest.mark.gpu
def test_short_tables_show_as_nan_and_no_sync():
    x = torch.randn(40, 2, 64, device=DEVICE).bfloat16()
    starts, tables = offsets([40], DEVICE), rope_tables(32, 64, device=DEVICE)
    apply_rope(x, starts, *tables)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = apply_rope(x, starts, *tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(out[:32].isfinite().all()) and bool(out[32:].isnan().all())
