"""Reader for untrusted folders of ``torch.distributed.checkpoint``.

The index, ``.metadata``, is a pickle that torch loads without restrictions, like the values beside the tensors. This
reader only accepts allowed content: classes are never instantiated, only their names and states are read. Tensors in
the index are checked against the files, and each part of a file is read by `engine.files.archive`.

The classes: https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.files.archive import placed, read_part
from engine.files.builder import CALLS, DTYPES, ITEM, Name
from engine.files.unpickle import Reader

__all__ = ["Chunk", "FolderIndex", "Part", "StoredTensor", "read_folder_index"]

_FILE = ".metadata"
_FREE, _OBJECTS = 40 * 2**20, 3  # memory limit for objects: a constant in bytes, and a multiple of the folder's size
_LARGEST = 256 * 2**20
_DEEPEST = 100  # levels of the nested state
_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "pathlib.")
_LAYOUT = "torch.serialization._get_layout"


@dataclass(frozen=True)
class Part:
    """A byte range of a file of the folder."""

    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and its location."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: Part


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in parts that cover it without overlaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FolderIndex:
    """Content of a folder.

    Attributes:
        folder: the folder.
        tensors: tensors by flat name.
        values: locations of other values by flat name.
        paths: keys of each in the nested state; empty if the state is flat.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Part]
    paths: Mapping[str, tuple[str | int, ...]]

    def chunk(self, name: str, chunk: Chunk) -> Tensor:
        """Read a part of a tensor.

        Raises:
            CheckpointError: if the file is damaged, or contains a different part.
        """
        value, wanted = read_part(self.folder / chunk.part.file, chunk.part.start, chunk.part.size), self.tensors[name]
        if not isinstance(value, Tensor) or value.dtype != wanted.dtype or value.shape != chunk.sizes:
            raise CheckpointError(f"{self.folder / chunk.part.file} does not contain the expected part of {name!r}.")
        return value

    def tensor(self, name: str, map_location: Any = "cpu") -> Tensor:
        """Read a whole tensor, assembled on the CPU.

        Raises:
            CheckpointError: as for `chunk`.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            whole[_slices(chunk)] = self.chunk(name, chunk)
        storage = placed(whole.untyped_storage(), "cpu", map_location)
        empty = torch.empty(0, dtype=stored.dtype, device=storage.device)
        return empty.set_(storage, 0, whole.shape, whole.stride())  # type: ignore[call-overload,no-any-return]

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor.

        Raises:
            CheckpointError: if the file is damaged, or contains anything but plain values and tensors.
        """
        part = self.values[name]
        return read_part(self.folder / part.file, part.start, part.size)

    def keys(self) -> list[str | int]:
        """Return the outermost keys of the nested state."""
        return list(dict.fromkeys(self._path(name)[0] for name in (*self.tensors, *self.values)))

    def state(self, key: str, map_location: Any = "cpu") -> Any:
        """Read only the entry of the nested state under one of its keys.

        Args:
            key: one of `keys`.
            map_location: as in ``torch.load``.

        Raises:
            CheckpointError: as for `chunk` and `value`, or if it is not a valid state.
        """
        root = _Level()
        for name in (*self.tensors, *self.values):
            path = self._path(name)
            if path[0] != key:
                continue
            level = root
            for step in path[:-1]:
                level = level.setdefault(step, _Level())
                if not isinstance(level, _Level):
                    raise CheckpointError(f"{self.folder / _FILE} is damaged: it puts a value inside {name[:100]!r}.")
            level[path[-1]] = self.tensor(name, map_location) if name in self.tensors else self.value(name)
        return _plain(root)[key]

    def _path(self, name: str) -> tuple[str | int, ...]:
        return self.paths.get(name, (name,))


def read_folder_index(folder: str | os.PathLike[str]) -> FolderIndex:
    """Read the index of a folder of ``torch.distributed.checkpoint`` without running code in it.

    Args:
        folder: the folder with its ``.metadata``.

    Raises:
        CheckpointError: if there is no index, it is damaged or contains other objects than those of an index, or it
            claims more than the files contain.
    """
    folder = Path(folder)
    if not (folder / _FILE).is_file():
        raise CheckpointError(f"{folder} is not a folder of a sharded checkpoint: it has no `{_FILE}`.")
    try:
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        if sizes[_FILE] > _LARGEST:
            raise ValueError("it has no sensible size")
        data = (folder / _FILE).read_bytes()
        index = _IndexReader(data, _no_storage, _FREE + _OBJECTS * sum(sizes.values()), 0).read()
        return _Checked(folder, sizes).index(index)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = str(error)[:300]
        raise CheckpointError(f"{folder / _FILE} cannot be read: it is damaged or not an index ({reason}).") from error


class _Level(dict[Any, Any]):
    """A dictionary or list of the nested state, as opposed to a leaf in a file."""


def _plain(level: Any) -> Any:
    """Convert levels to dictionaries, or to lists if their keys are consecutive numbers."""
    if not isinstance(level, _Level):
        return level
    values = {key: _plain(value) for key, value in level.items()}
    numbered = level.keys() == set(range(len(level)))
    return [values[number] for number in range(len(level))] if numbered else values


# ---------------------------------------------------------------- the pickle


class _Object:
    """Placeholder of an object: the name of its class or constructor function, its arguments and its state."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def get(self, key: str) -> Any:
        """Return an attribute; None if it is missing."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class _IndexReader(Reader):
    """Reader of newer pickles that creates no objects."""

    protocols = (2, 3, 4, 5)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._remembered: list[Any] = []

    def _named(self, name: str) -> Any:
        if name in DTYPES:
            return DTYPES[name]
        if name in CALLS or name == _LAYOUT or name.startswith(_MODULES):
            return Name(name)
        raise ValueError(f"it contains {name}, which does not belong in an index")

    def _stacked_name(self) -> None:
        name, module = self._pop(str), self._pop(str)
        self._push(self._named(f"{module}.{name}"))

    def _call(self) -> None:
        arguments, function = self._pop(tuple), self._pop(Name)
        if function.name in CALLS:
            self._push(CALLS[function.name](self._builder, *arguments))
        else:
            self._push(_Object(function.name, arguments))

    def _new(self) -> None:
        arguments, cls = self._pop(tuple), self._pop(Name)
        self._push(_Object(cls.name, arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._top(_Object)
        if target.state is not None:
            raise ValueError("it sets the state of an object twice")
        target.state = state

    def _key(self, key: Any) -> Any:
        return key if isinstance(key, _Object) else super()._key(key)

    def _memoize(self) -> None:
        self._take(ITEM)
        self._remembered.append(self._top(object))

    def _get(self, index: int) -> None:
        if index < len(self._remembered):
            self._push(self._remembered[index], ITEM)
        else:
            super()._get(index)


# https://github.com/python/cpython/blob/main/Lib/pickletools.py
_IndexReader.instructions = {
    **Reader.instructions,
    b"\x95": lambda reader: reader._number("<Q"),  # length of a frame, which is irrelevant here
    b"\x8c": lambda reader: reader._text(reader._bytes(1)[0]),
    b"\x94": lambda reader: reader._memoize(),
    b"\x93": lambda reader: reader._stacked_name(),
    b"R": lambda reader: reader._call(),
    b"\x81": lambda reader: reader._new(),
    b"b": lambda reader: reader._build(),
}


def _no_storage(key: str, size: int, location: str) -> torch.UntypedStorage:
    raise ValueError("it refers to a storage, which does not belong in an index")


# ---------------------------------------------------------------- the content


class _Checked:
    """Converter of an index to plain values, which are checked against the files.

    Args:
        folder: the folder.
        sizes: size in bytes of each file in it.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder, self._sizes = folder, sizes
        self._free = sum(sizes.values())

    def index(self, index: Any) -> FolderIndex:
        """Return the index."""
        _check(index, "Metadata")
        parts = {_place(key): self._part(value) for key, value in _items(index.get("storage_data"))}
        entries, paths = dict(_items(index.get("state_dict_metadata"))), index.get("planner_data") or {}
        tensors, values = {}, {}
        for name, entry in entries.items():
            if _kind(entry) == "TensorStorageMetadata":
                tensors[_text(name)] = self._tensor(name, entry, parts)
            else:
                _check(entry, "BytesStorageMetadata")
                values[_text(name)] = parts[f"None {name}"]
        return FolderIndex(self._folder, tensors, values, {_text(k): _path(v, len(entries)) for k, v in _items(paths)})

    def _part(self, value: Any) -> Part:
        _check(value, "_StorageInfo")
        if value.get("transform_descriptors"):
            raise ValueError("its files are compressed, which is not supported")
        file = _text(value.get("relative_path"))
        start, size = _numbers((value.get("offset"), value.get("length")))
        if file not in self._sizes or start + size > self._sizes[file]:
            raise ValueError(f"it refers to bytes that {file[:100]!r} does not have")
        self._free -= size
        if self._free < 0:
            raise ValueError("it refers to the same bytes repeatedly")
        return Part(file, start, size)

    def _tensor(self, name: str, entry: Any, parts: Mapping[str, Part]) -> StoredTensor:
        properties, chunks = entry.get("properties"), entry.get("chunks")
        state = properties.state if _kind(properties) == "TensorProperties" else None
        if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
            raise ValueError(f"it does not specify the kind of tensor {name[:100]!r}")
        shape = _numbers(entry.get("size"))
        torch.empty(shape, dtype=state[0], device="meta")  # rejects impossible shapes
        stored = StoredTensor(state[0], shape, tuple(_chunk(name, chunk, shape, parts) for chunk in chunks))
        for chunk in stored.chunks:
            if math.prod(chunk.sizes) * stored.dtype.itemsize > chunk.part.size:
                raise ValueError(f"{name[:100]!r} is larger than the bytes that it refers to")
        if not _cover(stored):
            raise ValueError(f"the parts of {name[:100]!r} do not cover it")
        return stored


def _place(key: Any) -> str:
    """Return offsets and flat name of a part of a file as text, whose hash cannot be chosen."""
    _check(key, "MetadataIndex")
    offset = key.get("offset")
    return f"{None if offset is None else _numbers(offset)} {_text(key.get('fqn'))}"


def _chunk(name: str, entry: Any, shape: tuple[int, ...], parts: Mapping[str, Part]) -> Chunk:
    _check(entry, "ChunkStorageMetadata")
    offsets, sizes = _numbers(entry.get("offsets")), _numbers(entry.get("sizes"))
    inside = all(first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True))
    if not inside:
        raise ValueError(f"a part of {name[:100]!r} is outside of it")
    return Chunk(offsets, sizes, parts[f"{offsets} {name}"])


def _cover(stored: StoredTensor) -> bool:
    """Whether each entry of a tensor is in exactly one chunk."""
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.shape):
        return False
    if len(stored.chunks) < 2:
        return True
    covered = torch.zeros(stored.shape, dtype=torch.bool)
    for chunk in stored.chunks:
        covered[_slices(chunk)] = True
    return bool(covered.all())


def _slices(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _kind(value: Any) -> str | None:
    """Return the declared class name of an object."""
    return value.name.rpartition(".")[2] if isinstance(value, _Object) else None


def _check(value: Any, kind: str) -> None:
    if _kind(value) != kind:
        raise ValueError(f"it contains a {_kind(value) or type(value).__name__} instead of a {kind}")


def _items(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"it contains a {type(value).__name__} instead of a dictionary")
    return value.items()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it contains a {type(value).__name__} instead of a name")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(number) is int and 0 <= number < 2**62 for number in values):
        raise ValueError("it contains something other than numbers")
    return tuple(values)


def _path(value: Any, limit: int) -> tuple[str | int, ...]:
    """Return the keys of a value in the nested state; list indices are limited by the number of values."""
    if not isinstance(value, tuple) or not 0 < len(value) <= _DEEPEST:
        raise ValueError("it contains something other than the keys of a value")
    if not all(isinstance(key, str) or (type(key) is int and 0 <= key < limit) for key in value):
        raise ValueError("it contains an invalid key of a value")
    return value
