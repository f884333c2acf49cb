"""The queue of the Hopper backward where queries are few: samples take turns, each one's key tiles keep their order."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
KEYS = 128


class Pointer:
    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, step):
        return Pointer(self.values, self.at + step)


def load(pointer, mask=None, other=0):
    at = torch.as_tensor(pointer.at)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
    return torch.where(mask, pointer.values[torch.where(mask, at, 0)], other)


@pytest.fixture(scope="module")
def place_of():
    """The kernel's own function, run on tensors."""
    from opengem.kernels.jfa import gluon_sm90_backward as kernels

    language = SimpleNamespace(arange=torch.arange, load=load, where=torch.where, minimum=torch.minimum,
                               sum=lambda x, axis: int(x.sum()), int32=torch.int32, constexpr=int)
    return FunctionType(kernels._place.fn.__code__, {"tl": language})


@pytest.mark.parametrize("spread", [4, 64])
@pytest.mark.parametrize("lengths", [[], [0, 0], [4096, 1, 0, 700, 129, 128, 5], [300] * 9])
def test_samples_take_turns_and_keep_the_order_of_their_tiles(place_of, lengths, spread):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch, slots = len(lengths), int(offsets[-1]) // KEYS + len(lengths) + 3  # rows of nobody follow
    starts = [*(int(offset) // KEYS + i for i, offset in enumerate(offsets)), slots]
    found = {(sample, tile): place_of(Pointer(offsets), sample, tile, slots, batch, spread, KEYS)
             for sample in range(batch + 1) for tile in range(starts[sample + 1] - starts[sample])}
    assert sorted(found.values()) == list(range(slots))
    order = sorted(found, key=found.get)
    for group in range(0, batch + 1, spread):
        mine = [(tile, sample) for sample, tile in order if group <= sample < group + spread]
        assert mine == sorted(mine)
