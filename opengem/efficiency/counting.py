"""What a layer must compute and move: FLOPs and bytes of its operations, forward and backward, and the least time.

Counted are operations that cannot be fused into their neighbours: matrix products, attention, norms, gathers, sorts.
Each reads its inputs and writes its outputs once. Element-wise work between them counts 0 bytes and 0 FLOPs, so the
bound is that of kernels cut as they are, with everything else fused into them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from opengem.efficiency.hardware import Roofs
from opengem.efficiency.layers import OTHER, Ranges, owner_of

# without this PyTorch's counter, and ours, would pass over products that are added in place
flop_registry[torch.ops.aten.addmm_] = flop_registry[torch.ops.aten.addmm]

GATHERS = {"aten::index_select", "aten::embedding", "aten::gather", "aten::index", "opengem::gather_rows"}
MOVES = GATHERS | {"aten::sort", "aten::cumsum", "aten::_embedding_bag", "aten::index_add_", "aten::native_layer_norm"}


@dataclass
class Work:
    """FLOPs, bytes and the milliseconds both roofs ask for."""

    flops: float = 0
    bytes: float = 0
    compute_ms: float = 0
    memory_ms: float = 0

    def add(self, flops: float, bytes: float, roofs: Roofs) -> None:
        ms, roof = roofs.ms(flops, bytes)
        self.flops, self.bytes = self.flops + flops, self.bytes + bytes
        if roof == "compute":
            self.compute_ms += ms
        else:
            self.memory_ms += ms

    @property
    def bound_ms(self) -> float:
        return self.compute_ms + self.memory_ms


class Counter(TorchDispatchMode):
    """Counts while it is on; `work()` gives (owner, phase) -> Work afterwards. Compiled code is counted as eager."""

    def __init__(self, ranges: Ranges, roofs: Roofs) -> None:
        super().__init__()
        self.ranges, self.roofs = ranges, roofs
        self.seen: list[tuple[str | int, float, float]] = []  # range or sequence number, FLOPs, bytes

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        packet, name = op._overloadpacket, op._schema.name
        if packet in flop_registry or name in MOVES or name.startswith("opengem::"):
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
            node = torch._C._current_autograd_node()
            where = (self.ranges.active or [OTHER])[-1] if node is None else node._sequence_nr()
            self.seen.append((where, flops, _moved(name, tree_leaves(args), tree_leaves(out))))
        return out

    def work(self) -> dict[tuple[str, str], Work]:
        numbers, found = self.ranges.numbers(), defaultdict(Work)
        for where, flops, moved in self.seen:
            key = (where, "forward") if isinstance(where, str) else (owner_of(where, *numbers), "backward")
            found[key].add(flops, moved, self.roofs)
        return dict(found)


def _moved(name: str, inputs: Iterable, outputs: Iterable) -> int:
    written = _bytes(outputs)
    if name in GATHERS:  # of the table only the rows that are asked for
        return 2 * written + sum(_bytes([x]) for x in inputs if isinstance(x, Tensor) and not x.is_floating_point())
    return written + _bytes(inputs)


def _bytes(tensors: Iterable) -> int:
    """Bytes of the elements in memory: what `expand` repeats counts once."""
    total = 0
    for x in tensors:
        if isinstance(x, Tensor):
            sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0]
            total += x.element_size() * torch.Size(sizes).numel()
    return total


def count(step: Callable[[], None], ranges: Ranges, roofs: Roofs) -> dict[tuple[str, str], Work]:
    """(range, "forward" or "backward") -> what one call of `step` must do there."""
    with torch.compiler.set_stance("force_eager"), Counter(ranges, roofs) as counter:
        step()
    return counter.work()
