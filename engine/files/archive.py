"""Read a file of ``torch.save`` that nobody vouches for.

``weights_only=True`` runs no code, but a file can still claim more memory than it holds: a compressed record, a tensor
that repeats four bytes ten billion times, a storage larger than its record (which torch 2.6 reads beyond its end). So
the archive is looked at before it is unpickled, the tensors are mapped from the file instead of allocated, which also
holds each to its record, and what they claim is added up before anybody works with them.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError

__all__ = ["read_archive"]

# What the tensors of a file may claim together: a few views that repeat entries are common, ten gigabytes of them not.
_FREE = 64 * 2**20
_TIMES = 4
_LARGEST_PICKLE = 256 * 2**20


def read_archive(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read a file with ``weights_only=True``, without trusting any size in it.

    Args:
        path: the file.
        map_location: as in ``torch.load``. On the CPU, tensors are mapped from the file, not copied.

    Returns:
        What it holds.

    Raises:
        CheckpointError: if there is no such file, or it is truncated, damaged, no file of ``torch.save``, holds other
            objects than primitives and tensors, or claims more memory than it holds.
    """
    name = os.fspath(path)
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {name}.")
    try:
        _check_records(name)
        found = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        _check_claims(found, os.path.getsize(name))
        on_cpu = map_location is None or isinstance(map_location, (str, torch.device))
        if not on_cpu or torch.device(map_location or "cpu").type != "cpu":
            found = torch.load(name, map_location=map_location, weights_only=True, mmap=True)
    except Exception as error:  # what unpickling a damaged file raises is not defined: see the documentation of pickle
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{name} cannot be read: it is truncated, damaged or no checkpoint ({reason}). "
            "Take another copy of it, or compact again."
        ) from error
    return found


def _check_records(path: str) -> None:
    size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise ValueError(f"its record {record.filename!r} is compressed")
            if record.header_offset + record.file_size > size:
                raise ValueError(f"its record {record.filename!r} is longer than the file")
        pickled = [record for record in archive.infolist() if record.filename.endswith("/data.pkl")]
        if len(pickled) != 1 or pickled[0].file_size > _LARGEST_PICKLE:
            raise ValueError("it has no record `data.pkl` of a sensible size")
        _check_globals(archive.read(pickled[0]))


def _check_globals(pickled: bytes) -> None:
    """Refuse what ``weights_only=True`` lets pass and what makes as many bytes as it is told to."""
    for name in _globals(pickled):
        if name.endswith(" bytearray") or name.startswith("torch") and name.endswith(("Tensor", "sparse_tensor")):
            raise ValueError(f"it holds {name.replace(' ', '.')}, which may claim any amount of memory")


def _globals(pickled: bytes) -> Iterator[str]:
    return (str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL")


def _tensors(found: Any) -> Iterator[Tensor]:
    """Yield all tensors, looking at each container once, however often it is referred to."""
    rest, seen = [found], set()
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            rest += item.values() if isinstance(item, dict) else item
            rest += getattr(item, "__dict__", {}).values()  # of an ordered dictionary: the metadata of a state dict


def _check_claims(found: Any, size: int) -> None:
    claims: dict[int, int] = {}
    for tensor in _tensors(found):
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"it holds a tensor that is no plain one ({tensor.layout}, {tensor.device})")
        key = tensor.untyped_storage().data_ptr()
        claims[key] = max(claims.get(key, 0), tensor.numel() * tensor.element_size())
    if sum(claims.values()) > _FREE + _TIMES * size:
        raise ValueError(f"its tensors claim {sum(claims.values())} bytes, and it has {size}")
