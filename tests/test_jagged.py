"""Jagged: what was given comes back, wrong shapes are named, and a hole in the middle is ordinary."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opengem.jagged import Jagged, offsets_from_lengths
from tests.kernels.grid import LENGTHS, case


@pytest.fixture(params=LENGTHS)
def lengths(request) -> list[int]:
    return case(request.param)[0]


# ---- construction and round trips ----------------------------------------------------------------------------


def test_padded_round_trip(lengths):
    values = torch.randn(sum(lengths), 2, 3)
    jagged = Jagged.from_lengths(values, torch.tensor(lengths, dtype=torch.int64))
    assert jagged.lengths.tolist() == lengths and len(jagged) == jagged.batch_size == len(lengths)
    padded = jagged.to_padded(fill=-1.0)
    assert padded.shape == (len(lengths), jagged.max_length, 2, 3)
    for row, length, part in zip(padded, lengths, jagged.to_list(), strict=True):
        assert torch.equal(row[:length], part) and (row[length:] == -1).all()
    back = Jagged.from_padded(padded, torch.tensor(lengths, dtype=torch.int64))
    assert torch.equal(back.values, values) and torch.equal(back.offsets, jagged.offsets)


def test_rows_know_their_sample_and_position(lengths):
    jagged = Jagged.from_lengths(torch.zeros(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))
    pairs = [(b, i) for b, n in enumerate(lengths) for i in range(n)]
    assert jagged.row_to_sample.tolist() == [b for b, _ in pairs]
    assert jagged.positions.tolist() == [i for _, i in pairs]


def test_padding_is_written_even_where_memory_is_dirty(poisoned_empty):
    padded = Jagged.from_list([[1.0], [], [2.0, 3.0]]).to_padded(size=3)
    assert padded.tolist() == [[1, 0, 0], [0, 0, 0], [2, 3, 0]]


def test_padding_passes_gradients_to_real_rows_only():
    values = torch.ones(3, requires_grad=True)
    weights = torch.tensor([[1.0, 10.0], [2.0, 3.0]])
    (Jagged(values, torch.tensor([0, 1, 3]), 2).to_padded() * weights).sum().backward()
    assert values.grad.tolist() == [1, 2, 3]


def test_from_list():
    jagged = Jagged.from_list([[1, 2], [], torch.tensor([3])], dtype=torch.int64)
    assert jagged.values.tolist() == [1, 2, 3] and jagged.offsets.tolist() == [0, 2, 2, 3] and jagged.max_length == 2
    wide = Jagged.from_list([torch.zeros(0, 4), torch.ones(2, 4)])
    assert wide.values.shape == (2, 4)


def test_empty_batches():
    """A batch of zero rows has the offsets [0] and passes through everything."""
    for empty in (
        Jagged.from_list([], dtype=torch.int64),
        Jagged.from_lengths(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32)),
        Jagged.from_padded(torch.zeros(0, 5, 4), torch.zeros(0, dtype=torch.int64)),
    ):
        assert empty.offsets.tolist() == [0] and empty.batch_size == 0 and empty.to_list() in ([], [empty.values])
        assert empty.to_padded().shape[0] == 0 and empty.row_to_sample.numel() == empty.positions.numel() == 0
        values = empty.values.float().requires_grad_()
        empty.with_values(values).to_padded().sum().backward()
        assert values.grad.shape == values.shape


# ---- offsets are int64, whatever comes in --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_do_not_overflow_32_bits(dtype):
    """Lengths 2^30, 2^30, 1 sum beyond int32; the dtype is set by the code, never by the data."""
    offsets = offsets_from_lengths(torch.tensor([2**30, 2**30, 1], dtype=dtype))
    assert offsets.dtype == torch.int64 and offsets.tolist() == [0, 2**30, 2**31, 2**31 + 1]
    assert offsets_from_lengths(torch.zeros(2, dtype=dtype)).dtype == torch.int64


def test_int32_offsets_are_refused():
    with pytest.raises(ValueError, match="must be int64, got torch.int32; use offsets.long"):
        Jagged(torch.zeros(2), torch.tensor([0, 2], dtype=torch.int32), 2)


# ---- what is refused -----------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 1, 3])
BAD = {
    "more values than offsets": (lambda: Jagged(torch.zeros(4), OFFSETS, 2), "has 4 rows, offsets end at 3"),
    "fewer values than offsets": (lambda: Jagged(torch.zeros(2), OFFSETS, 2), "has 2 rows, offsets end at 3"),
    "first offset": (lambda: Jagged(torch.zeros(3), torch.tensor([1, 3]), 2), "must start at 0, got 1"),
    "falling offsets": (
        lambda: Jagged(torch.zeros(2), torch.tensor([0, 3, 2]), 3),
        "sequence 1 has length -1",
    ),
    "too long": (
        lambda: Jagged.from_lengths(torch.zeros(3), torch.tensor([3]), max_length=2),
        "sequence 0 has length 3, more than max_length 2; truncate it first",
    ),
    "no offsets": (lambda: Jagged(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0), "must have shape [B + 1]"),
    "two-dimensional offsets": (lambda: Jagged(torch.zeros(0), torch.zeros(1, 1, dtype=torch.int64), 0), "[1, 1]"),
    "scalar values": (lambda: Jagged(torch.tensor(1.0), OFFSETS, 2), "got a scalar"),
    "devices": (lambda: Jagged(torch.zeros(3, device="meta"), OFFSETS, 2), "are on cpu, values on meta"),
    "max_length": (lambda: Jagged(torch.zeros(3), OFFSETS, 2.0), "must be a host int >= 0, got 2.0"),
    "negative length": (
        lambda: Jagged.from_lengths(torch.zeros(1), torch.tensor([2, -1])),
        "sequence 1 has length -1",
    ),
    "float lengths": (lambda: Jagged.from_lengths(torch.zeros(1), torch.tensor([1.0])), "must be an integer tensor"),
    "padded too short": (
        lambda: Jagged.from_padded(torch.zeros(1, 2), torch.tensor([3])),
        "must lie in [0, 2], got 3 to 3",
    ),
    "padded of another batch": (
        lambda: Jagged.from_padded(torch.zeros(2, 2), torch.tensor([1])),
        "got [2, 2] and [1]",
    ),
    "padding loses rows": (lambda: Jagged(torch.zeros(3), OFFSETS, 2).to_padded(size=1), "rows would be lost"),
    "other values": (lambda: Jagged(torch.zeros(3), OFFSETS, 2).with_values(torch.zeros(2)), "needs 3 rows, got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    make, words = BAD[name]
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


# ---- change --------------------------------------------------------------------------------------------------


def test_map_keeps_the_offsets():
    jagged = Jagged(torch.ones(3), OFFSETS, 2)
    doubled = jagged.map(lambda v: v * 2)
    assert doubled.values.tolist() == [2, 2, 2] and doubled.offsets is jagged.offsets and doubled.max_length == 2


def test_to_moves_both_tensors():
    moved = Jagged(torch.ones(3), OFFSETS, 2).to("meta")
    assert moved.device.type == moved.offsets.device.type == "meta" and moved.max_length == 2


def test_shapes_are_checked_without_contents():
    """Under fake tensors (tracing) there are no contents, but a wrong dtype or rank is still refused."""
    with FakeTensorMode():
        with pytest.raises(ValueError, match="int64"):
            Jagged(torch.zeros(3), torch.zeros(3, dtype=torch.int32), 2)
        with pytest.raises(ValueError, match="got a scalar"):
            Jagged(torch.zeros(()), torch.zeros(3, dtype=torch.int64), 2)
        traced = Jagged.from_lengths(torch.zeros(3), torch.ones(3, dtype=torch.int64), max_length=2)
        assert traced.offsets.shape == (4,) and traced.to_padded().shape == (3, 2)


def test_works_under_compile():
    def function(values, offsets):
        jagged = Jagged(values, offsets, 2)
        return jagged.map(lambda v: v + jagged.positions).to_padded()

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    values = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(compiled(values, OFFSETS), function(values, OFFSETS))


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu():
    jagged = Jagged(torch.ones(3, device="cuda"), OFFSETS.cuda(), 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        padded = Jagged(jagged.values, jagged.offsets, 2).map(lambda v: v * 2).to_padded()
        jagged.row_to_sample, jagged.positions, jagged.lengths  # noqa: B018
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert padded.tolist() == [[2, 0], [2, 2]]


def test_repr_tells_the_shape():
    assert repr(Jagged(torch.ones(3, 4), OFFSETS, 2)).startswith("Jagged(B=2, T=3, row=[4], dtype=torch.float32")
