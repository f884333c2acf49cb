"""Tables in a checkpoint: each process writes and reads the rows it stores of a table that has one global name.

torch.distributed.checkpoint asks objects with these three methods which part of a global tensor they hold. So any
number of processes, with any placement and generation, reads what any other wrote, and none ever holds a whole table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TableRows(Tensor):
    """The parts of a global tensor that this process stores; a tensor only in its shape and dtype."""

    runs: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, runs: dict[tuple[int, ...], Tensor]) -> TableRows:
        """shape: of the whole. like: any tensor of its dtype. runs: (first row, first column, if any) -> view of the
        live tensor, maybe none."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.runs = runs
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise TypeError(f"{function}: TableRows holds only a part of a table; use EmbeddingCollection.gather()")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(first), view.shape) for first, view in self.runs.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.runs[tuple(index.offset)]
