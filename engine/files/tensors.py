"""Reader for untrusted safetensors files, which checks the header and copies the tensors; and what a file consists of.

The format: https://github.com/huggingface/safetensors#format. Truncating a memory-mapped file kills the process, and
overwriting it changes checked content, so each tensor is copied into memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.errors import InputError

__all__ = ["TensorFile", "bytes_of", "check_text", "header_of", "opened_tensors"]

_FREE, _TIMES = 24 * 2**20, 1.5  # memory limit for decoded JSON: a constant in bytes, and a multiple of the file size
_LARGEST_HEADER = 64 * 2**20
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNED = 8  # bytes, for the start of the first tensor


@dataclass(frozen=True)
class TensorFile:
    """An open file.

    Attributes:
        metadata: metadata of the header, as text.
        places: dtype, shape, start and end in the file of each tensor, by name.
    """

    metadata: Mapping[str, str]
    places: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    _file: BinaryIO

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory.

        Raises:
            ValueError: if the file was truncated.
            KeyError: if there is no tensor of this name.
        """
        dtype, shape, start, end = self.places[name]
        data = torch.empty(end - start, dtype=torch.uint8)
        self._file.seek(start)
        if self._file.readinto(data.numpy()) != end - start:  # type: ignore[attr-defined]
            raise ValueError("it is shorter than it claims")
        return data.view(dtype).view(shape)


@contextmanager
def opened_tensors(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a safetensors file inside the context.

    Raises:
        ValueError, KeyError, TypeError: if it is damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size or length > _LARGEST_HEADER:
            raise ValueError("its header has no sensible size")
        text = file.read(length).decode("utf-8")
        check_text(text, size)
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("its header is not a mapping")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not text")
        places = {name: _place(name, entry, 8 + length) for name, entry in header.items()}
        end = 8 + length
        for _, _, first, last in sorted(places.values(), key=lambda place: place[2:]):
            if first != end:
                raise ValueError("its tensors overlap or leave gaps")
            end = last
        if end != size:
            raise ValueError("its size does not match its header")
        yield TensorFile(metadata, places, file)


def _place(name: str, entry: Any, base: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, end)):
        raise ValueError(f"its tensor {name!r} has an impossible shape")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its tensor {name!r} does not have the size of its shape")
    return dtype, shape, base + start, base + end


def check_text(text: str, size: int) -> None:
    """Reject JSON that would take much more memory than the size of its file.

    Args:
        text: the JSON.
        size: size of the file in bytes.

    Raises:
        ValueError: if it would.
    """
    objects = 400 * (text.count("{") + text.count("dtype")) + 100 * (text.count("[") + text.count(",")) + len(text)
    if objects > _FREE + _TIMES * size:
        raise ValueError("its header would take much more memory than it has bytes")


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return what a file begins with, and the order in which tensors follow it, so that all of them are aligned.

    Raises:
        InputError: for a dtype that the format does not have.
    """
    odd = next((name for name, tensor in tensors.items() if tensor.dtype not in _NAMES), None)
    if odd is not None:
        raise InputError(f"safetensors does not store tensors of {tensors[odd].dtype}, such as {odd!r}.")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text, order


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, one after the other."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
