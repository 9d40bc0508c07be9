"""Safe loading of `torch.distributed.checkpoint` folders in Lightning, without unpickling code."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from engine.files import FolderIndex, read_folder_index
from lightning_compress.trainer.packages import TREES

__all__ = ["CheckedReader", "checked_folders"]


class CheckedReader(FileSystemReader):
    """Torch's reader of a folder, with a checked index and plain values only.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: if its index is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._index = read_folder_index(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the checked index to torch's metadata."""
        index, entries = self._index, {}
        for name, tensor in index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        values = {name: BytesStorageMetadata() for name in index.values}
        return Metadata({**entries, **values}, dict(index.paths), {}, StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a load plan."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(self._index.value(item.storage_index.fqn)))
            else:
                _read_tensor(self._index, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _saved(value: Any) -> io.BytesIO:
    """Serialise plain values by `torch.save`, because planners unpickle what they receive."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _read_tensor(index: FolderIndex, item: ReadItem, planner: LoadPlanner) -> None:
    name, offset = item.storage_index.fqn, item.storage_index.offset
    chunk = next(chunk for chunk in index.tensors[name].chunks if offset is None or chunk.offsets == tuple(offset))
    part = index.chunk(name, chunk)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _load(state: dict[str, Any], path: Path) -> None:
    """Replace Lightning's `_distributed_checkpoint_load`."""
    load(state, storage_reader=CheckedReader(path), planner=DefaultLoadPlanner())


@contextlib.contextmanager
def checked_folders() -> Iterator[None]:
    """Make Lightning's `ModelParallelStrategy` read folders by `CheckedReader` inside the context."""
    modules = [importlib.import_module(f"{fabric}.strategies.model_parallel") for _, fabric in TREES]
    own = [module._distributed_checkpoint_load for module in modules]
    for module in modules:
        module._distributed_checkpoint_load = _load  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, function in zip(modules, own, strict=True):
            module._distributed_checkpoint_load = function  # type: ignore[attr-defined]
