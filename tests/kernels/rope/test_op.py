"""Rotary embedding against complex multiplication, sample by sample, in fp64."""

import pytest
import torch

from opengem.kernels.rope import cost
from opengem.kernels.rope.op import apply_rope, rope_tables
from tests.kernels.block.test_op import rotated
from tests.kernels.grid import LENGTHS, fused_views, offsets

SAME = [name for name, (_, keys) in LENGTHS.items() if keys is None]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_forward_and_backward_match_the_definition(name, interleaved, poisoned_empty):
    lengths = LENGTHS[name][0]
    x = fused_views(sum(lengths), 3, 16)[1].requires_grad_()
    tables = rope_tables(800, 16)
    out = apply_rope(x, offsets(lengths), *tables, interleaved=interleaved)
    parts = [rotated(part.double(), interleaved, *tables) for part in x.split(lengths)] if lengths else []
    exact = torch.cat([x[:0].double(), *parts])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(out)
    got, = torch.autograd.grad(out, x, weight)
    want, = torch.autograd.grad(exact, x, weight.double())
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-5)


def test_positions_restart_at_each_sample():
    x = torch.randn(1, 1, 8).expand(4, 1, 8)
    out = apply_rope(x, offsets([2, 2]), *rope_tables(9, 8))
    assert torch.equal(out[2], x[2]) and torch.equal(out[:2], out[2:])


def test_scores_depend_on_the_distance_alone_up_to_position_65535():
    q, k = torch.randn(1, 1, 64, dtype=torch.float64), torch.randn(1, 1, 64, dtype=torch.float64)
    cos, sin = rope_tables(65_536, 64)
    starts = offsets([65_536])
    for interleaved in (False, True):
        turned = [apply_rope(x.expand(65_536, 1, 64), starts, cos, sin, interleaved=interleaved) for x in (q, k)]
        near, far = (turned[0][i] @ turned[1][i - 7].mT for i in (7, 65_535))
        torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)


def test_bf16_gradcheck_and_int32_offsets():
    tables = rope_tables(9, 8)
    x = torch.randn(5, 2, 8)
    out = apply_rope(x.bfloat16(), offsets([5], dtype=torch.int32), *tables)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), apply_rope(x, offsets([5]), *tables), rtol=2e-2, atol=2e-2)
    leaf = x.double().requires_grad_()
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(
            lambda y, i=interleaved: apply_rope(y, offsets([2, 3]), *tables, interleaved=i), leaf)


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(3, 8)}, r"\[T, H, D\]|even head dim"),
    ({"cos": torch.zeros(2, 4), "sin": torch.zeros(2, 4)}, "2 positions, the longest sample may have 3"),
    ({"max_length": 2}, "more than max_length 2"),
    ({"cos": torch.zeros(9, 3)}, "even head dim"),
    ({"sin": torch.zeros(9, 4).double()}, "float32"),
    ({"offsets": torch.tensor([0, 2])}, "offsets run from 0 to 2"),
    ({"offsets": torch.tensor([0.0, 3.0])}, "int32 or int64"),
])
def test_errors_name_the_argument(change, message):
    cos, sin = rope_tables(9, 8)
    arguments = {"x": torch.zeros(3, 1, 8), "offsets": offsets([3]), "cos": cos, "sin": sin} | change
    with pytest.raises(ValueError, match=message):
        apply_rope(**arguments)
    with pytest.raises(ValueError, match="head_dim must be even"):
        rope_tables(4, 7)


def test_opcheck_compile_and_bytes():
    cos, sin = rope_tables(9, 8)
    x = torch.randn(5, 2, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.opengem.rope, (x, offsets([2, 3]), cos, sin, False, False))

    def run(y):
        return apply_rope(y, offsets([2, 3]), cos, sin)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    assert cost.bytes(10, 2, 8, positions=3) == 2 * 160 * 2 + 3 * 8 * 4
