"""Wide copies move the same bits as plain ones and touch nothing else."""

import pytest
import torch

from opengem.kernels.copy import put


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, dim", [(5, 64), (5, 8), (5, 4), (5, 6), (0, 8)])
def test_a_place_between_others_takes_the_bits(rows, dim, dtype):
    buffer, made = torch.zeros(rows, 8, dim, dtype=dtype), torch.randn(rows, 2, dim).to(dtype)
    for x in (made, made[:, :1].expand(-1, 2, -1), made.flip(2)):
        put(buffer[:, 3:5], x)
        assert torch.equal(buffer[:, 3:5], x) and not buffer[:, :3].any() and not buffer[:, 5:].any()


def test_numbers_that_do_not_start_at_16_bytes_are_copied_as_well():
    buffer, x = torch.zeros(5, 17, dtype=torch.bfloat16), torch.randn(5, 8).bfloat16()
    put(buffer[:, 1:9], x)
    assert torch.equal(buffer[:, 1:9], x)
