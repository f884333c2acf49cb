"""MFU is against the dense bf16 peak of a known device; Local MFU is weighted by FLOPs."""

from __future__ import annotations

import pytest
import torch

from opengem.efficiency import hardware, mfu


def test_mfu_is_against_the_dense_bf16_peak():
    found = mfu.rates(1e9, 98_950.0, "NVIDIA H200")
    assert found["useful_tflops"] == pytest.approx(98.95)
    assert found["mfu"] == pytest.approx(0.1)


@pytest.mark.parametrize("device", ["X", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "nvidia h200", ""])
def test_an_unknown_device_has_no_mfu_and_a_sentence_says_so(device):
    """M1: no fall-back to another device's peak, not even to that of one with a similar name."""
    assert mfu.rates(1e9, 100.0, device)["mfu"] is None
    assert mfu.local([{"flops": 10, "forward_ms": 1.0, "backward_ms": 0.0}], hardware.bf16_peak(device)) is None
    assert repr(device) in hardware.why_no_mfu(device) and "no MFU" in hardware.why_no_mfu(device)


def test_peaks_are_dense():
    """M1: the data sheets' headline figures are with 2:4 sparsity."""
    assert hardware.bf16_peak("NVIDIA H200") == hardware.bf16_peak("NVIDIA H100 80GB HBM3") == 989.5
    assert hardware.bf16_peak("NVIDIA B200") == 2250.0
    assert mfu.rates(1e9, None, "NVIDIA H200") == {"useful_tflops": None, "mfu": None}


def test_local_mfu_is_the_mean_of_the_layers_weighted_by_flops():
    peak = 1.0  # TFLOPS: 1e9 FLOPs a millisecond
    rows = [
        {"flops": flops, "forward_ms": forward, "backward_ms": backward, "recompute_ms": 99.0}
        for flops, forward, backward in ((2e9, 4.0, 8.0), (1e9, 1.0, 3.0), (0, 20.0, 30.0))
    ]
    assert mfu.local(rows, peak) == pytest.approx(2 / 3 * 0.5 + 1 / 3 * 0.75)
    assert mfu.local(rows[2:], peak) is None


def test_more_than_the_peak_is_no_mfu_but_a_warning():
    with pytest.warns(UserWarning, match="1200 TFLOPS are above the peak"):
        assert mfu.rates(1.2e15, 1.0, "NVIDIA H200") == {"useful_tflops": pytest.approx(1200), "mfu": None}
    with pytest.warns(UserWarning, match="above the peak"):
        assert mfu.local([{"flops": 1e9, "forward_ms": 1.0, "backward_ms": 1.0}], 1.0) is None


def test_a_roof_binds_where_it_is_the_slower_one():
    roofs = hardware.Roofs(tflops=100.0, gbs=1000.0, source="test")
    assert roofs.ms(1e12, 1e9) == (pytest.approx(10.0), "compute")
    assert roofs.ms(1e10, 1e9) == (pytest.approx(1.0), "memory")


def test_roofs_of_a_cpu_are_measured():
    bound, now = hardware.roofs(torch.device("cpu"), torch.float32)
    assert bound == now and "measured" in bound.source and bound.tflops > 0 and bound.gbs > 0
