"""Useful FLOPs of a run equal the sum over its samples; a device without a known peak has no MFU."""

from __future__ import annotations

import random

import pytest

from opengem.efficiency import hardware, mfu
from opengem.model.gem import GEM
from tests import small


def test_flops_from_histograms_are_those_of_the_samples():
    model = GEM(small.SCHEMA, list(small.SCHEMA.features), small.config().model, 8)
    lengths = [random.Random(0).randint(0, 16) for _ in range(50)] + [0, 16]
    counts = [lengths.count(n) for n in range(17)]
    direct = 3 * sum(model.flops({"view": lengths}).values())
    assert mfu.training_flops(model.flops, {"view": counts}, len(lengths)) == direct


def test_no_streams_and_no_samples():
    def forward(lengths):
        return {"heads": 10 * max((len(v) for v in lengths.values()), default=1)}

    assert mfu.training_flops(forward, {}, 7) == 210
    assert mfu.training_flops(forward, {"view": [0, 0]}, 0) == 0


def test_mfu_is_against_the_dense_bf16_peak():
    found = mfu.rates(1e9, 98_950.0, "NVIDIA H200")
    assert found["useful_tflops"] == pytest.approx(98.95)
    assert found["mfu"] == pytest.approx(0.1)


def test_an_unknown_device_has_no_mfu_and_a_sentence_says_so():
    assert mfu.rates(1e9, 100.0, "X")["mfu"] is None
    assert mfu.rates(1e9, None, "NVIDIA H200") == {"useful_tflops": None, "mfu": None}
    assert "'X'" in hardware.why_no_mfu("X") and "no MFU" in hardware.why_no_mfu("X")
    assert hardware.bf16_peak("NVIDIA H200") == 989.5  # dense, not the sparse 1,979
