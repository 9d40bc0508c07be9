"""Reader for untrusted files of ``torch.save``.

``weights_only=True`` runs no code, but a file can still claim more memory than it holds, and look different to
different readers. This reader only accepts records that every reader sees alike (`engine.files.records`) and allowed
content (`engine.files.unpickle`). Everything is copied into memory before it is checked, so that a file that is
overwritten or truncated meanwhile is an error and cannot change checked content.
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
from engine.files.records import Record, check_bytes, read_record, records_of
from engine.files.unpickle import unpickled
from engine.program.defaults import own_defaults

__all__ = ["placed", "read_archive", "read_bytes", "read_part"]

# Limits of the memory of objects, and of the sizes that tensors claim: a few views that repeat entries are common.
_FREE = 20 * 2**20
_OBJECTS, _CLAIMS = 1.5, 4  # times the size of the file
_LARGEST_PICKLE = 256 * 2**20


@own_defaults()
def read_archive(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read an untrusted file of plain values and tensors.

    Memory is limited to that of the tensors plus, for other objects, 20 MB and 1.5 times the file size.

    Args:
        path: the file.
        map_location: as in ``torch.load``.

    Returns:
        The content of the file.

    Raises:
        CheckpointError: if there is no such file, or it is truncated, damaged, not written by ``torch.save``, contains
            other objects than primitives and tensors, or claims more memory than it holds.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {os.fspath(path)}.")
    with _explained(path), open(path, "rb") as file:
        return _read(file, map_location)


@own_defaults()
def read_bytes(path: str | os.PathLike[str]) -> tuple[Any, BinaryIO]:
    """Read a file of plain values and tensors, and return the same bytes for another reader.

    Args:
        path: the file.

    Returns:
        The content as returned by `read_archive`, and the bytes of the file in memory.

    Raises:
        CheckpointError: as for `read_archive`.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {os.fspath(path)}.")
    file = io.BytesIO(Path(path).read_bytes())
    with _explained(path):
        content = _read(file, "cpu")
    file.seek(0)
    return content, file


@own_defaults()
def read_part(path: str | os.PathLike[str], start: int, size: int) -> Any:
    """Read a range of a file that `torch.save` wrote, after copying it into memory.

    Args:
        path: the file.
        start: the first byte.
        size: number of bytes.

    Returns:
        The content, as `read_archive` returns it for a separate file.

    Raises:
        CheckpointError: as for `read_archive`.
    """
    with _explained(path), open(path, "rb") as file:
        file.seek(start)
        return _read(io.BytesIO(file.read(size)), "cpu")


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _MissingDeviceError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be loaded. {error}") from error
    except Exception as error:  # damaged files and user-defined classes may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{os.fspath(path)} cannot be read: it is truncated, damaged or not a checkpoint ({reason}). "
            "Use another copy of it, or compact again."
        ) from error


def _read(file: BinaryIO, map_location: Any) -> Any:
    size, records = file.seek(0, os.SEEK_END), records_of(file)
    pickled = records.get("data.pkl")
    if pickled is None or pickled.size > _LARGEST_PICKLE:
        raise ValueError("it has no record `data.pkl` of a sensible size")
    order = records.get("byteorder")
    if order is not None and read_record(file, order).decode() != sys.byteorder:
        raise ValueError("it was written on a machine with another byte order")

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
        raise ValueError("it is shorter than it claims")
    check_bytes(record, data.numpy().data)
    return data.untyped_storage()


class _MissingDeviceError(CheckpointError):
    """Tensors that cannot be moved where they were saved, or are to be."""


def placed(storage: torch.UntypedStorage, location: str, map_location: Any) -> torch.UntypedStorage:
    """Move a storage from ``location`` according to ``map_location`` of ``torch.load``.

    Raises:
        CheckpointError: if there is no such device here.
    """
    if callable(map_location) and not isinstance(map_location, torch.device):
        chosen = map_location(storage, location)
        return _moved(storage, location) if chosen is None else chosen
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    return _moved(storage, location)


def _moved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    try:
        device = torch.device(location)
        if device.type == "cpu":
            return storage
        return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()  # type: ignore[call-overload]
    except Exception as error:  # each kind of device has errors of its own
        reason = str(error).partition("\n")[0].rstrip(".")
        raise _MissingDeviceError(
            f'Its tensors cannot be moved to {location!r} ({reason}). Pass `map_location="cpu"`, or a device that '
            "this machine has."
        ) from error
