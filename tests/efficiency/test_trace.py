"""Every kernel finds its layer: by the range of its launch, in backward by the number of its autograd node."""

from __future__ import annotations

import pytest

from opengem.efficiency import trace
from opengem.efficiency.layers import OTHER, STEP, Ranges

RANGES = Ranges([(0, 4, "a"), (4, 6, "inner"), (4, 9, "b"), (0, 10, "model"), (0, 10, "casts")])


def _event(name, start, length, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args}


def _launch(at, correlation, tid=1, driver=False):
    kind = "cuda_driver" if driver else "cuda_runtime"
    return _event("launch", at, 1, kind, tid, correlation=correlation)


def _kernel(name, start, length, correlation):
    return _event(name, start, length, "kernel", 7, correlation=correlation)


def _range(name, start, length):
    return _event(f"opengem/{name}", start, length, "user_annotation")


GPU = [
    _event(STEP, 0, 1000, "user_annotation"),
    _range("a", 10, 100), _event("aten::mm", 20, 50, **{"Input Dims": [[2, 3], [3, 4], []]}), _launch(30, 1),
    _range("b", 200, 100), _range("inner", 210, 20), _launch(215, 2, driver=True), _launch(250, 3),
    _launch(400, 4),  # in the step, in no range
    # backward, on the engine's thread
    _event(f"{trace.ENGINE}MmBackward0", 500, 50, tid=2, **{"Sequence number": 3}),
    _event("aten::mm", 510, 30, tid=2), _launch(515, 5, tid=2),
    _event(f"{trace.ENGINE}XBackward", 560, 10, tid=2, **{"Sequence number": 5}), _launch(565, 6, tid=2),
    _event(f"{trace.ENGINE}YBackward", 580, 10, tid=2, **{"Sequence number": 9}), _launch(585, 7, tid=2),
    _event(f"{trace.ENGINE}torch::autograd::AccumulateGrad", 600, 10, tid=2), _launch(605, 8, tid=2),
    # a layer that backward runs again
    _event(f"{trace.ENGINE}CheckpointBackward", 700, 90, tid=2, **{"Sequence number": 1}),
    {**_range("a", 710, 50), "tid": 2}, _launch(720, 9, tid=2),
    _launch(1100, 10),  # after the step
    *[_kernel(f"k{i}", 1000 * i, 500, i) for i in range(1, 11)],
    {"ph": "i", "name": "an instant"},
]  # fmt: skip


def test_kernels_find_their_layer_and_phase():
    found = {i.name: (i.owner, i.phase) for i in trace.intervals(GPU, RANGES)}
    assert found == {
        "k1": ("a", "forward"), "k2": ("inner", "forward"), "k3": ("b", "forward"), "k4": (OTHER, "forward"),
        "k5": ("a", "backward"), "k6": ("inner", "backward"), "k7": ("model", "backward"),
        "k8": ("gradients", "backward"), "k9": ("a", "recompute"),
    }  # fmt: skip


def test_times_are_milliseconds_from_the_start_of_the_step_and_shapes_are_kept():
    first = trace.intervals(GPU, RANGES)[0]
    assert (first.start, first.ms) == (1.0, 0.5)
    assert first.op == "aten::mm [2, 3] [3, 4]"


def test_of_equally_wide_ranges_the_inner_one_owns_its_numbers():
    assert Ranges([(0, 5, "inner"), (0, 5, "outer")]).numbers() == ([0, 5], ["inner", OTHER])


def test_of_several_steps_the_last_one_is_read():
    later = [_event(STEP, 2000, 100, "user_annotation"), _launch(2050, 11), _kernel("late", 2060, 10, 11)]
    assert [i.name for i in trace.intervals(GPU + later, RANGES)] == ["late"]
    with pytest.raises(ValueError, match="no step"):
        trace.intervals([e for e in GPU if e["name"] != STEP], RANGES)


def test_operations_of_a_cpu_sum_to_the_step():
    """Each operation counts without those inside it, so nothing counts twice and nothing is lost."""
    events = [e for e in GPU if e.get("cat") in ("cpu_op", "user_annotation") and e["tid"] == 1]
    found = trace.intervals(events, RANGES)
    assert sum(i.ms for i in found) == pytest.approx(1.0)
    of = {name: sum(i.ms for i in found if i.owner == name) for name in ("a", "b", "inner", OTHER)}
    assert of == pytest.approx({"a": 0.1, "b": 0.08, "inner": 0.02, OTHER: 0.8})


def test_busy_time_counts_overlaps_once():
    times = ((0, 2), (1, 2), (5, 1), (5.2, 0.3))
    intervals = [trace.Interval(start, ms, "a", "forward", "k", "") for start, ms in times]
    assert trace.busy_ms(intervals) == pytest.approx(4.0)
    assert trace.busy_ms([]) == 0.0


def test_communication_is_exposed_where_nothing_else_runs():
    times = ((0, 4, "gemm"), (3, 3, "ncclDevKernel_AllGather"), (8, 1, "ncclDevKernel_SendRecv"), (8.5, 1, "gemm"))
    found = [trace.Interval(start, ms, "a", "forward", name, "") for start, ms, name in times]
    assert trace.exposed_ms(found) == pytest.approx(2.0 + 0.5)
