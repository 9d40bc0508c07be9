"""Construction of the values and tensors in a pickle of ``torch.save``, with a memory limit.

Each function that such a pickle may call has a method here that does the same for plain arguments and rejects others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CALLS", "DTYPES", "ITEM", "OBJECT", "STORAGES", "TENSOR_CLASSES", "Builder", "Load", "Name"]

Load = Callable[[str, int, str], torch.UntypedStorage]
"""Name of a storage, its size in bytes and its original device -> the storage."""

_ODD_KEYS = 1000  # limit of keys that are neither text nor small integers, whose hashes could be made to collide
OBJECT, ITEM = 120, 16  # bytes of an object, and of its slot in a container
_TENSOR = 800

_KINDS = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
STORAGES: dict[str, torch.dtype | None] = {f"torch.{name}Storage": dtype for name, dtype in _KINDS.items()}
STORAGES["torch.storage.UntypedStorage"] = None
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch._tensor.Tensor")


@dataclass(frozen=True)
class Name:
    """Name of a class or function in the pickle."""

    name: str


@dataclass(frozen=True, eq=False)
class Storage:
    """A storage with the dtype of its elements; None if the tensors specify it."""

    key: str
    data: torch.UntypedStorage
    dtype: torch.dtype | None


class Builder:
    """Builder of the content of a pickle, with the remaining memory budget.

    Args:
        load: reads a storage; called once per storage.
        memory: maximum memory of objects in bytes, without storages.
        claims: maximum total size in bytes of all different tensors.
    """

    def __init__(self, load: Load, memory: int, claims: int) -> None:
        self._load, self._memory, self._claims = load, memory, claims
        self._odd_keys = 0
        self._storages: dict[str, Storage] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def take(self, size: int) -> None:
        """Count the memory of an object.

        Raises:
            ValueError: if the limit is exceeded.
        """
        self._memory -= size
        if self._memory < 0:
            raise ValueError("its objects would take much more memory than it has bytes")

    def key(self, key: Any) -> Any:
        """Return a key of a dictionary or entry of a set.

        Raises:
            ValueError: for too many keys whose hashes could collide.
        """
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 2**31):
            self._odd_keys += 1
            if self._odd_keys > _ODD_KEYS:
                raise ValueError("too many of its keys are neither text nor small integers")
        return key

    # ------------------------------------------------------------ plain values

    def _ordered(self) -> OrderedDict[Any, Any]:
        return OrderedDict()

    def _counter(self, counts: Any = None) -> Counter[Any]:
        if not isinstance(counts, (dict, type(None))):
            raise ValueError("it counts something other than a dictionary")
        self.take(OBJECT * len(counts or ()))
        return Counter(counts)

    def _set_of(self, items: Any = ()) -> set[Any]:
        if not isinstance(items, (list, tuple)):
            raise ValueError("it creates a set of something other than a list")
        self.take(OBJECT * len(items))
        return {self.key(item) for item in items}

    def _complex(self, real: Any, imaginary: Any) -> complex:
        return complex(float(real), float(imaginary))

    def _encoded(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise ValueError("it encodes what is not bytes")
        self.take(len(text))
        return text.encode("latin-1")

    def _empty_bytes(self, *arguments: Any) -> bytes:
        if arguments:
            raise ValueError("it creates bytes of something else")
        return b""

    def _size(self, sizes: Any = ()) -> torch.Size:
        self.take(OBJECT * len(sizes))
        return torch.Size(_numbers(sizes))

    def _device(self, kind: Any, index: Any = None) -> torch.device:
        return torch.device(str(kind)) if index is None else torch.device(str(kind), int(index))

    # ------------------------------------------------------------ tensors

    def storage(self, reference: tuple[Any, ...]) -> Storage:
        """Resolve a reference to a storage outside the pickle."""
        if len(reference) != 5 or reference[0] != "storage" or not isinstance(reference[1], Name):
            raise ValueError("it refers to something outside that is not a storage")
        _, kind, key, location, count = reference
        if kind.name not in STORAGES or not isinstance(key, str) or not isinstance(location, str):
            raise ValueError("it refers to a storage of an unknown kind")
        dtype, (count,) = STORAGES[kind.name], _numbers([count])
        size = count * (1 if dtype is None else dtype.itemsize)
        if key not in self._storages:
            self._storages[key] = Storage(key, self._load(key, size, location), dtype)
        storage = self._storages[key]
        if storage.dtype is not dtype or storage.data.nbytes() != size:
            raise ValueError(f"it refers to the storage {key!r} in two ways")
        return storage

    def _tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
        """``torch._utils._rebuild_tensor_v2``, followed by requires_grad, hooks and metadata."""
        dtype = storage.dtype if isinstance(storage, Storage) else None
        if dtype is None or len(rest) > 3 or any(rest[1:]):
            raise ValueError("it holds a tensor of a class or layout that is not supported")
        return self._view(storage, dtype, offset, sizes, strides, *rest[:1])

    def _typed_tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
        """``torch._utils._rebuild_tensor_v3``, followed by requires_grad, hooks, dtype and metadata."""
        plain = isinstance(storage, Storage) and 3 <= len(rest) <= 4 and isinstance(rest[2], torch.dtype)
        if not plain or rest[1] or any(rest[3:]):
            raise ValueError("it holds a tensor of a class or layout that is not supported")
        return self._view(storage, rest[2], offset, sizes, strides, rest[0])

    def _view(
        self, storage: Storage, dtype: torch.dtype, offset: Any, sizes: Any, strides: Any, gradient: Any = False
    ) -> Tensor:
        (offset,), sizes, strides = _numbers([offset]), _numbers(sizes), _numbers(strides)
        key = (storage.key, dtype, offset, sizes, strides, bool(gradient))
        if key not in self._views:
            last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            if math.prod(sizes) and (last + 1) * dtype.itemsize > storage.data.nbytes():
                raise ValueError("it holds a tensor that is larger than its storage")
            self._claims -= math.prod(sizes) * dtype.itemsize
            if self._claims < 0:
                raise ValueError("its tensors claim much more memory than it has bytes")
            self.take(_TENSOR)
            empty = torch.empty(0, dtype=dtype, device=storage.data.device)
            self._views[key] = empty.set_(storage.data, offset, sizes, strides).requires_grad_(bool(gradient))  # type: ignore[call-overload]
        return self._views[key]

    def _parameter(self, data: Any, gradient: Any, hooks: Any, state: Any = None) -> nn.Parameter:
        if not isinstance(data, Tensor) or hooks:
            raise ValueError("it holds a parameter of a class or layout that is not supported")
        self.take(_TENSOR)
        return nn.Parameter(data, bool(gradient))

    def _of_class(self, function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
        """``torch._tensor._rebuild_from_type_v2``, a tensor with attributes, which are ignored."""
        plain = isinstance(function, Name) and function.name.startswith("torch._utils._rebuild_")
        if not plain or not isinstance(kind, Name) or kind.name not in TENSOR_CLASSES:
            raise ValueError("it holds a tensor of a class or layout that is not supported")
        if not isinstance(arguments, tuple) or function.name not in CALLS:
            raise ValueError("it holds a tensor of a class or layout that is not supported")
        tensor: Tensor = CALLS[function.name](self, *arguments)
        return tensor


def _numbers(sizes: Any) -> tuple[int, ...]:
    """Return sizes, strides or an offset, after rejecting negative and implausibly large ones."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64:
        raise ValueError("it holds a tensor without a shape")
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("it holds a tensor with an impossible shape")
    return tuple(sizes)


CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": Builder._ordered,
    "collections.Counter": Builder._counter,
    "builtins.set": Builder._set_of,
    "builtins.complex": Builder._complex,
    "builtins.bytes": Builder._empty_bytes,
    "_codecs.encode": Builder._encoded,
    "torch.Size": Builder._size,
    "torch.device": Builder._device,
    "torch._utils._rebuild_tensor": Builder._tensor,
    "torch._utils._rebuild_tensor_v2": Builder._tensor,
    "torch._utils._rebuild_tensor_v3": Builder._typed_tensor,
    "torch._utils._rebuild_parameter": Builder._parameter,
    "torch._utils._rebuild_parameter_with_state": Builder._parameter,
    "torch._tensor._rebuild_from_type_v2": Builder._of_class,
}
