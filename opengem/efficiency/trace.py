"""From a profiler trace to the owner of every microsecond of a step.

On a GPU an interval is a kernel or a copy, led back through its launch to the CPU operation that caused it. On a CPU it
is the time an operation spends outside of the operations it calls. The owner is a range of `layers.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opengem.efficiency.layers import OTHER, PREFIX, STEP, Ranges, owner_of

ENGINE = "autograd::engine::evaluate_function: "
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# autograd nodes that are no layer's, by the name of the node
NODES = {"torch::autograd::AccumulateGrad": "gradients"}


@dataclass(frozen=True)
class Interval:
    """`start` and `ms` in milliseconds from the start of the step; owner: a range; phase: forward, backward, recompute.

    name: the kernel (or CPU operation); op: the operation that launched it, with the shapes of its inputs if known.
    """

    start: float
    ms: float
    owner: str
    phase: str
    name: str
    op: str


@dataclass
class _Node:
    name: str
    start: float
    end: float
    args: dict
    parent: _Node | None = None
    inner: float = 0.0
    owner: tuple[str, str] | None = None


def export(profiler) -> list[dict]:
    """The events of a stopped `torch.profiler.profile`, as in its Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(errors="replace"))["traceEvents"]


def intervals(events: Iterable[dict], ranges: Ranges) -> list[Interval]:
    """Every interval of the last step (the range `layers.STEP`) in the trace, in order of time."""
    events = [e for e in events if e.get("ph") == "X" and "dur" in e]
    nodes = _nest([e for e in events if e.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES)])
    steps = [node for tree in nodes.values() for node in tree if node.name == STEP]
    if not steps:
        raise ValueError("trace holds no step; run the step inside the range layers.STEP")
    step, owners = max(steps, key=lambda node: node.start), _Owners(ranges)
    kernels = [e for e in events if e.get("cat") in DEVICE]
    found = _kernels(kernels, nodes, step, owners) if kernels else _operations(nodes, step, owners)
    return sorted(found, key=lambda interval: interval.start)


def _nest(events: list[dict]) -> dict[tuple, list[_Node]]:
    """Events of each thread as nodes with their parents, in order of start."""
    threads: dict[tuple, list[_Node]] = {}
    for e in events:
        node = _Node(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}))
        if e["cat"] in LAUNCHES:
            node.args = {"launch": node.args.get("correlation")}
        threads.setdefault((e["pid"], e["tid"]), []).append(node)
    for tree in threads.values():
        tree.sort(key=lambda node: (node.start, -node.end))
        stack: list[_Node] = []
        for node in tree:
            while stack and stack[-1].end <= node.start:
                stack.pop()
            if stack:
                node.parent = stack[-1]
                node.parent.inner += min(node.end, node.parent.end) - node.start
            stack.append(node)
    return threads


class _Owners:
    """(owner, phase) of a node: the innermost range around it or, in backward, the range its autograd node is from."""

    def __init__(self, ranges: Ranges) -> None:
        self.numbers = ranges.numbers()

    def __call__(self, node: _Node) -> tuple[str, str]:
        chain = []
        while node is not None and node.owner is None:
            chain.append(node)
            node = node.parent
        owner = node.owner if node is not None else (OTHER, "forward")
        for link in reversed(chain):
            if link.name.startswith(PREFIX) and link.name != STEP:
                owner = (link.name[len(PREFIX) :], "forward" if owner[1] == "forward" else "recompute")
            elif link.name.startswith(ENGINE):
                owner = (self._of_backward(link), "backward")
            link.owner = owner
        return owner

    def _of_backward(self, node: _Node) -> str:
        kind = node.name[len(ENGINE) :]
        if kind in NODES:
            return NODES[kind]
        return owner_of(node.args.get("Sequence number", -1), *self.numbers)


def _kernels(kernels: list[dict], nodes: dict, step: _Node, owners: _Owners) -> list[Interval]:
    launched = {n.args["launch"]: n for tree in nodes.values() for n in tree if n.args.get("launch") is not None}
    found = []
    for e in kernels:
        launch = launched.get(e.get("args", {}).get("correlation"))
        if launch is None or not step.start <= launch.start < step.end:
            continue
        owner, phase = owners(launch)
        start = (e["ts"] - step.start) / 1e3
        found.append(Interval(start, e["dur"] / 1e3, owner, phase, e["name"], _shape(launch.parent)))
    return found


def _operations(nodes: dict, step: _Node, owners: _Owners) -> list[Interval]:
    """Each operation's time without that of the operations inside it; the step's own share is the interpreter's."""
    found = []
    for tree in nodes.values():
        for node in tree:
            if step.start <= node.start and node.end <= step.end:
                owner, phase = owners(node)
                own = max(0.0, node.end - node.start - node.inner) / 1e3
                found.append(Interval((node.start - step.start) / 1e3, own, owner, phase, node.name, _shape(node)))
    return found


def _shape(node: _Node | None) -> str:
    """The operation with the shapes of its inputs, and the outermost one it is part of."""
    if node is None:
        return ""
    shapes = [list(dims) for dims in node.args.get("Input Dims", []) if dims and not isinstance(dims[0], list)]
    outer = node
    while outer.parent is not None and not outer.name.startswith(ENGINE) and not outer.parent.name.startswith(PREFIX):
        outer = outer.parent
    cause = "" if outer is node else f" in {outer.name.removeprefix(ENGINE)}"
    return f"{node.name} {' '.join(map(str, shapes))}{cause}"


def exposed_ms(found: list[Interval]) -> float:
    """Milliseconds in which collectives run and nothing else does."""
    return busy_ms(found) - busy_ms([i for i in found if "nccl" not in i.name.lower()])


def busy_ms(found: list[Interval]) -> float:
    """Milliseconds in which at least one interval runs."""
    total, end = 0.0, float("-inf")
    for interval in sorted(found, key=lambda i: i.start):
        total += max(0.0, interval.start + interval.ms - max(end, interval.start))
        end = max(end, interval.start + interval.ms)
    return total
