"""Checks of what the host knows about jagged arguments; shared by every op of this package that takes offsets."""

from __future__ import annotations

import torch
from torch import Tensor


def check_offsets(op: str, offsets: Tensor, rows: int, device: torch.device, max_length: int | None = None) -> None:
    """ValueError unless `offsets` can describe `rows` rows on `device`.

    Shape, dtype and device are always checked; contents (start, end, order, longest sample against `max_length`) only
    where they lie on the host, because reading them from a GPU would stop the stream.
    """
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{op}: offsets must have shape [B + 1] with B >= 0, got {list(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: offsets must be int32 or int64, got {offsets.dtype}; use offsets.long()")
    if offsets.device != device:
        raise ValueError(f"{op}: offsets are on {offsets.device}, values on {device}; move both to one device")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int | torch.SymInt)):
        raise ValueError(f"{op}: max_length must be a host int, got {type(max_length).__name__}")
    if host_readable(offsets):
        _check_contents(op, offsets, rows, max_length)


def host_readable(offsets: Tensor) -> bool:
    """Whether the contents of `offsets` can be read without a device sync and outside tracing."""
    return offsets.device.type == "cpu" and type(offsets) is Tensor and not torch.compiler.is_compiling()


def _check_contents(op: str, offsets: Tensor, rows: int, max_length: int | None) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != rows:
        raise ValueError(f"{op}: values have {rows} rows, offsets run from {first} to {last}; wanted 0 to {rows}")
    if offsets.shape[0] == 1:
        return
    lengths = offsets.diff()
    if int(lengths.min()) < 0:
        raise ValueError(f"{op}: offsets must not decrease, sample {int(lengths.argmin())} has a negative length")
    if max_length is not None and int(lengths.max()) > max_length:
        raise ValueError(
            f"{op}: sample {int(lengths.argmax())} has length {int(lengths.max())}, more than max_length {max_length}; "
            "truncate it first or raise max_length"
        )


def check_same(op: str, **tensors: Tensor) -> None:
    """ValueError unless all tensors share device and dtype; the message names the first that differs."""
    (first, reference), *rest = tensors.items()
    if not reference.is_floating_point():
        raise ValueError(f"{op}: {first} must be floating point, got {reference.dtype}")
    for name, tensor in rest:
        if tensor.device != reference.device or tensor.dtype != reference.dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}, {first} is {reference.dtype} on "
                f"{reference.device}; both must agree"
            )
