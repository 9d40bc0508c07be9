"""Read an untrusted file of ``torch.save``.

``weights_only=True`` runs no code, but a file can still claim more memory than it holds, and be another one for each
reader. So it is read here, by the records that any reader sees (`engine.files.records`) and by a list of what they may
hold (`engine.files.unpickle`). All of it is copied into memory before anybody looks at it: a file that is overwritten
or cut off meanwhile is an error, and changes nothing of what was checked.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engine.errors import CheckpointError
from engine.files.records import Record, read_record, records_of
from engine.files.unpickle import unpickled

__all__ = ["placed", "read_archive", "read_bytes", "read_part"]

# What the objects of a file may take, and what its tensors may claim: a few views that repeat entries are common.
_FREE = 20 * 2**20
_OBJECTS, _CLAIMS = 1.5, 4  # times the size of the file
_LARGEST_PICKLE = 256 * 2**20


def read_archive(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read a file of plain values and tensors, without trusting anything in it.

    It takes the memory of its tensors, and for the objects at most 20 MB and one and a half times the file.

    Args:
        path: the file.
        map_location: as in ``torch.load``.

    Returns:
        What it holds.

    Raises:
        CheckpointError: if there is no such file, or it is truncated, damaged, no file of ``torch.save``, holds other
            objects than primitives and tensors, or claims more memory than it holds.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {os.fspath(path)}.")
    with _explained(path), open(path, "rb") as file:
        return _read(file, map_location)


def read_bytes(path: str | os.PathLike[str]) -> tuple[Any, BinaryIO]:
    """Read a file of plain values and tensors, and its bytes for another reader, which gets the very same.

    Args:
        path: the file.

    Returns:
        What `read_archive` gives, and the file's content in memory.

    Raises:
        CheckpointError: as `read_archive` does.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {os.fspath(path)}.")
    file = io.BytesIO(Path(path).read_bytes())
    with _explained(path):
        content = _read(file, "cpu")
    file.seek(0)
    return content, file


def read_part(path: str | os.PathLike[str], start: int, size: int) -> Any:
    """Read what `torch.save` wrote into a part of a file, which is copied into memory first.

    Args:
        path: the file.
        start: the first byte.
        size: number of bytes.

    Returns:
        What `read_archive` gives of a file of its own.

    Raises:
        CheckpointError: as `read_archive` does.
    """
    with _explained(path), open(path, "rb") as file:
        file.seek(start)
        return _read(io.BytesIO(file.read(size)), "cpu")


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a damaged file raises is not defined, nor what the user's own classes raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{os.fspath(path)} cannot be read: it is truncated, damaged or no checkpoint ({reason}). "
            "Take another copy of it, or compact again."
        ) from error


def _read(file: BinaryIO, map_location: Any) -> Any:
    size, records = file.seek(0, os.SEEK_END), records_of(file)
    pickled = records.get("data.pkl")
    if pickled is None or pickled.size > _LARGEST_PICKLE:
        raise ValueError("it has no record `data.pkl` of a sensible size")
    order = records.get("byteorder")
    if order is not None and read_record(file, order).decode() != sys.byteorder:
        raise ValueError("it was written on a machine with another order of bytes")

    def load(key: str, claimed: int, location: str) -> torch.UntypedStorage:
        record = records.get(f"data/{key}")
        if record is None or record.size != claimed:
            raise ValueError(f"its storage {key!r} does not have the size of its record")
        return placed(_storage(file, record), location, map_location)

    return unpickled(read_record(file, pickled), load, _FREE + int(_OBJECTS * size), _FREE + _CLAIMS * size)


def _storage(file: BinaryIO, record: Record) -> torch.UntypedStorage:
    data = torch.empty(record.size, dtype=torch.uint8)
    file.seek(record.start)
    if file.readinto(data.numpy()) != record.size:  # type: ignore[attr-defined]
        raise ValueError("it is shorter than it says")
    return data.untyped_storage()


def placed(storage: torch.UntypedStorage, location: str, map_location: Any) -> torch.UntypedStorage:
    """Return a storage where ``map_location`` of ``torch.load`` wants it; ``location`` says where it was."""
    if callable(map_location) and not isinstance(map_location, torch.device):
        chosen = map_location(storage, location)
        return storage.to(device=torch.device(location)) if chosen is None else chosen
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    device = torch.device(location)
    if device.type == "cpu":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()  # type: ignore[call-overload]
