"""The one ragged type: `B` sequences of different lengths stored back to back, without padding.

Everything that is "a list per sample" in OpenGEM (event histories, id lists, tokens) is a `Jagged`. Kernels take its
plain tensors (`values`, `offsets`, `max_length`), as in FlashAttention's varlen interface. Read `data/batch.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Jagged:
    """`B` sequences back to back.

    values: `[T, ...]`, any dtype; row `offsets[b] + i` is element `i` of sequence `b`.
    offsets: int64 `[B + 1]`, starts at 0, never decreases, ends at `T`; on the same device as `values`.
    max_length: host int, an upper bound of every length. It sizes kernel grids, never the result.

    Empty sequences and an empty batch (`offsets == [0]`) are ordinary. The contents of `offsets` are checked when they
    lie on the host; on a GPU only shapes and dtypes are (a check of contents would stop the stream).
    Raises ValueError naming what was given and what was wanted.
    """

    values: Tensor
    offsets: Tensor
    max_length: int

    def __post_init__(self) -> None:
        if self.values.dim() < 1:
            raise ValueError("Jagged.values must have at least one dimension [T, ...], got a scalar")
        if self.offsets.dim() != 1 or self.offsets.shape[0] < 1:
            raise ValueError(f"Jagged.offsets must have shape [B + 1] with B >= 0, got {list(self.offsets.shape)}")
        if self.offsets.dtype != torch.int64:
            raise ValueError(f"Jagged.offsets must be int64, got {self.offsets.dtype}; use offsets.long()")
        if self.offsets.device != self.values.device:
            raise ValueError(
                f"Jagged.offsets are on {self.offsets.device}, values on {self.values.device}; move both to one device"
            )
        if not isinstance(self.max_length, int) or isinstance(self.max_length, bool) or self.max_length < 0:
            raise ValueError(f"Jagged.max_length must be a host int >= 0, got {self.max_length!r}")
        if type(self.offsets) is Tensor and self.offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_contents()

    def _check_contents(self) -> None:
        first, last, rows = int(self.offsets[0]), int(self.offsets[-1]), self.values.shape[0]
        if first != 0:
            raise ValueError(f"Jagged.offsets must start at 0, got {first}")
        if last != rows:
            raise ValueError(f"Jagged.values has {rows} rows, offsets end at {last}; both must be equal")
        if self.offsets.shape[0] == 1:
            return
        lengths = self.offsets.diff()
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0:
            where = int(lengths.argmin())
            raise ValueError(f"Jagged.offsets must not decrease: sequence {where} has length {shortest}")
        if longest > self.max_length:
            where = int(lengths.argmax())
            raise ValueError(
                f"Jagged sequence {where} has length {longest}, more than max_length {self.max_length}; "
                "truncate it first or raise max_length"
            )

    # ---- construction ----------------------------------------------------------------------------------------

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, max_length: int | None = None) -> Jagged:
        """From `values` `[T, ...]` and integer `lengths` `[B]`; `max_length` defaults to the longest (a host read)."""
        if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(f"lengths must be an integer tensor [B], got {lengths.dtype} {list(lengths.shape)}")
        if max_length is None:
            max_length = int(lengths.max()) if lengths.numel() else 0
        if max_length < 0:
            raise ValueError(f"lengths must be >= 0, got {max_length}")
        return cls(values, offsets_from_lengths(lengths), max_length)

    @classmethod
    def from_list(cls, rows: Sequence[Sequence | Tensor], dtype: torch.dtype | None = None) -> Jagged:
        """From a list of sequences (lists or tensors `[n_i, ...]`); an empty list is an empty batch."""
        tensors = [row if isinstance(row, Tensor) else torch.tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
        kept = [t for t in tensors if t.shape[0]] or tensors[:1]
        values = torch.cat(kept) if kept else torch.empty(0, dtype=dtype)
        return cls.from_lengths(values if dtype is None else values.to(dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Jagged:
        """From `padded` `[B, L, ...]` and `lengths` `[B]`: keeps the first `lengths[b]` rows of each sample."""
        if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
            raise ValueError(
                f"padded must be [B, L, ...] and lengths [B], got {list(padded.shape)} and {list(lengths.shape)}"
            )
        size = padded.shape[1]
        if lengths.numel() and (int(lengths.max()) > size or int(lengths.min()) < 0):
            raise ValueError(f"lengths must lie in [0, {size}], got {int(lengths.min())} to {int(lengths.max())}")
        mask = torch.arange(size, device=padded.device) < lengths[:, None]
        return cls.from_lengths(padded[mask], lengths, size)

    # ---- views -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return self.batch_size

    @property
    def lengths(self) -> Tensor:
        """int64 `[B]`."""
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def row_to_sample(self) -> Tensor:
        """int64 `[T]`: the sequence each row belongs to. No host sync."""
        samples = torch.arange(self.batch_size, device=self.device)
        return torch.repeat_interleave(samples, self.lengths, output_size=self.values.shape[0])

    @property
    def positions(self) -> Tensor:
        """int64 `[T]`: 0, 1, 2, ... from the start of each sequence. No host sync."""
        rows = torch.arange(self.values.shape[0], device=self.device)
        return rows - self.offsets[self.row_to_sample]

    def to_list(self) -> list[Tensor]:
        """One tensor `[n_i, ...]` per sequence (a host read of the lengths)."""
        return list(self.values.split(self.lengths.tolist()))

    def to_padded(self, fill: float = 0, size: int | None = None) -> Tensor:
        """`[B, size, ...]` (default `max_length`) with `fill` behind each sequence; rows past `size` are an error."""
        size = self.max_length if size is None else size
        if size < self.max_length:
            raise ValueError(f"to_padded size {size} is below max_length {self.max_length}; rows would be lost")
        out = self.values.new_full((self.batch_size, size, *self.values.shape[1:]), fill)
        return out.index_put((self.row_to_sample, self.positions), self.values)

    # ---- change ----------------------------------------------------------------------------------------------

    def with_values(self, values: Tensor) -> Jagged:
        """The same sequences with other rows (`values.shape[0]` must stay `T`)."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"with_values needs {self.values.shape[0]} rows, got {values.shape[0]}")
        return _unchecked(values, self.offsets, self.max_length)

    def map(self, function: Callable[[Tensor], Tensor]) -> Jagged:
        """`with_values(function(values))`."""
        return self.with_values(function(self.values))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Jagged:
        """`move` applied to both tensors (a device copy, pinning); contents must stay the same."""
        return _unchecked(move(self.values), move(self.offsets), self.max_length)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Jagged:
        return self.moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        return self.moved(Tensor.pin_memory)

    def __repr__(self) -> str:
        return (
            f"Jagged(B={self.batch_size}, T={self.values.shape[0]}, row={list(self.values.shape[1:])}, "
            f"dtype={self.values.dtype}, max_length={self.max_length}, device={self.device})"
        )


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """int64 `[B + 1]`: 0 and the running sum, in int64 whatever the dtype of `lengths` (int32 would overflow)."""
    zero = lengths.new_zeros(1, dtype=torch.int64)
    return torch.cat([zero, lengths.to(torch.int64).cumsum(0)])


def _unchecked(values: Tensor, offsets: Tensor, max_length: int) -> Jagged:
    """A Jagged whose offsets were checked before (skips the host-side pass over them)."""
    out = object.__new__(Jagged)
    object.__setattr__(out, "values", values)
    object.__setattr__(out, "offsets", offsets)
    object.__setattr__(out, "max_length", max_length)
    return out
