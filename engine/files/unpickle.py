"""Read the pickle in a file of ``torch.save`` by a list of what it may hold.

Neither `pickle` nor torch's own reader for ``weights_only=True`` bound what they build: a few bytes may call for a
string to be encoded again and again, a memo of billions of entries, or a tensor that repeats four bytes. This reader
knows the instructions that `torch.save` writes, builds tensors and plain values and nothing else, and counts the memory
of each against what the file may take. Classes and functions that the user vouched for with
``torch.serialization.add_safe_globals`` are called as torch calls them.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Load", "unpickled"]

Load = Callable[[str, int, str], torch.UntypedStorage]
"""Name of a storage, its size in bytes and where it was -> the storage."""

_DEEPEST = 100  # levels of containers in each other
_LONGEST = 64  # bytes of an integer
_ODD_KEYS = 1000  # keys of dictionaries that are neither text nor small integers, whose hashes anyone can make collide
_OBJECT, _TENSOR, _ITEM = 120, 800, 16  # bytes that an object takes, and its place in a container

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
_STORAGES: dict[str, torch.dtype | None] = {f"torch.{name}Storage": dtype for name, dtype in _KINDS.items()}
_STORAGES["torch.storage.UntypedStorage"] = None
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch._tensor.Tensor")


@dataclass(frozen=True)
class _Name:
    """A class or function that the pickle names, by what it stands for here."""

    name: str


class _Vouched:
    """A class or function that the user has declared safe."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True, eq=False)
class _Storage:
    """A storage with the dtype of its elements; None where the tensors say it."""

    key: str
    data: torch.UntypedStorage
    dtype: torch.dtype | None


def unpickled(data: bytes, load: Load, memory: int, claims: int) -> Any:
    """Return what a pickle of ``torch.save`` stands for.

    Args:
        data: the pickle.
        load: reads a storage; called once for each.
        memory: bytes that the objects may take, without the storages.
        claims: bytes that all different tensors may span together.

    Raises:
        ValueError: where it holds something else than plain values and tensors, or more than it may.
    """
    return _Reader(data, load, memory, claims).read()


class _Reader:
    """The machine that the instructions of a pickle are for: a stack, marks on it, and a memo."""

    def __init__(self, data: bytes, load: Load, memory: int, claims: int) -> None:
        self._data, self._load, self._memory, self._claims = data, load, memory, claims
        self._place, self._odd_keys = 0, 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, _Storage] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self._vouched = _vouched()

    def read(self) -> Any:
        while True:
            instruction = self._bytes(1)
            if instruction == b".":
                return self._finished()
            run = _INSTRUCTIONS.get(instruction)
            if run is None:
                raise ValueError(f"it holds the instruction {instruction!r}, which torch does not write")
            run(self)

    def _finished(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise ValueError("its pickle ends in the middle")
        _check_nesting(self._stack[0])
        return self._stack[0]

    # ------------------------------------------------------------ bytes and memory

    def _bytes(self, count: int) -> bytes:
        part = self._data[self._place : self._place + count]
        if count < 0 or len(part) != count:
            raise ValueError("its pickle ends too early")
        self._place += count
        return part

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._place, self._place + 256)
        if end < 0:
            raise ValueError("its pickle names something without an end")
        line = self._bytes(end - self._place).decode("ascii")
        self._place += 1
        return line

    def _take(self, size: int) -> None:
        self._memory -= size
        if self._memory < 0:
            raise ValueError("its objects would take much more memory than it has bytes")

    def _push(self, value: Any, size: int = _OBJECT) -> None:
        self._take(size)
        self._stack.append(value)

    def _pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self._stack:
            raise ValueError("its pickle takes what is not there")
        value = self._stack.pop()
        if not isinstance(value, kind):
            raise ValueError(f"its pickle holds a {type(value).__name__} where it cannot be")
        return value

    def _top(self, kind: type | tuple[type, ...]) -> Any:
        value = self._pop(kind)
        self._stack.append(value)
        return value

    # ------------------------------------------------------------ plain values

    def _text(self, size: int, encoding: str = "utf-8") -> None:
        raw = self._bytes(size)
        self._push(raw.decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict"), 4 * size + _OBJECT)

    def _long(self) -> None:
        size = self._bytes(1)[0]
        if size > _LONGEST:
            raise ValueError("it holds an integer without a sensible size")
        self._push(int.from_bytes(self._bytes(size), "little", signed=True))

    def _protocol(self) -> None:
        if self._bytes(1)[0] != 2:
            raise ValueError("its pickle has another protocol than 2, which `torch.save` writes")

    # ------------------------------------------------------------ memo and containers

    def _put(self, index: int) -> None:
        if index not in self._memo:
            self._take(_OBJECT)
        self._memo[index] = self._top(object)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise ValueError("its pickle refers to what is not there")
        self._push(self._memo[index], _ITEM)

    def _mark(self) -> None:
        self._take(_OBJECT)
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle ends what has not begun")
        items, self._stack = self._stack, self._marks.pop()
        self._take(_ITEM * len(items))
        return items

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)), _OBJECT + _ITEM * count)

    def _marked_tuple(self) -> None:
        self._push(tuple(self._marked()))

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)
        self._take(_ITEM)

    def _appends(self) -> None:
        items = self._marked()
        self._top(list).extend(items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._marked())

    def _set(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("its pickle holds a key without a value")
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._take(_OBJECT)
            target[self._key(key)] = value

    def _key(self, key: Any) -> Any:
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 2**31):
            self._odd_keys += 1
            if self._odd_keys > _ODD_KEYS:
                raise ValueError("too many of its keys are neither text nor small integers")
        return key

    # ------------------------------------------------------------ classes, functions and calls

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}".replace("__builtin__.", "builtins.")
        if name in _DTYPES:
            self._push(_DTYPES[name])
        elif name in _CALLS or name in _STORAGES or name in _TENSOR_CLASSES:
            self._push(_Name(name))
        elif name in self._vouched:
            self._push(_Vouched(self._vouched[name]))
        else:
            raise ValueError(
                f"it holds {name}, which is neither a plain value nor a tensor; declare it with "
                "`torch.serialization.add_safe_globals` where you trust the file"
            )

    def _call(self) -> None:
        arguments = self._pop(tuple)
        function = self._pop((_Name, _Vouched))
        if isinstance(function, _Vouched):
            self._push(function.value(*arguments))
        elif function.name in _CALLS:
            self._push(_CALLS[function.name](self, *arguments))
        else:
            raise ValueError(f"it calls {function.name}")

    def _new(self) -> None:
        arguments, cls = self._pop(tuple), self._pop(_Vouched).value
        self._push(cls.__new__(cls, *arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._top(object)
        if type(target) is OrderedDict and isinstance(state, dict) and set(state) <= {"_metadata"}:
            vars(target).update(state)
        elif type(target).__qualname__ in self._built() and hasattr(target, "__setstate__"):
            target.__setstate__(state)
        elif type(target).__qualname__ in self._built() and isinstance(state, dict):
            vars(target).update(state)
        else:
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def _built(self) -> set[str]:
        return {value.__qualname__ for value in self._vouched.values() if isinstance(value, type)}

    def _ordered(self) -> OrderedDict[Any, Any]:
        return OrderedDict()

    def _counter(self, counts: Any = None) -> Counter[Any]:
        if not isinstance(counts, (dict, type(None))):
            raise ValueError("it counts something else than a dictionary")
        self._take(_OBJECT * len(counts or ()))
        return Counter(counts)

    def _set_of(self, items: Any = ()) -> set[Any]:
        if not isinstance(items, (list, tuple)):
            raise ValueError("it makes a set of something else than a list")
        self._take(_OBJECT * len(items))
        return {self._key(item) for item in items}

    def _complex(self, real: Any, imaginary: Any) -> complex:
        return complex(float(real), float(imaginary))

    def _encoded(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise ValueError("it encodes what is no bytes")
        self._take(len(text))
        return text.encode("latin-1")

    def _empty_bytes(self, *arguments: Any) -> bytes:
        if arguments:
            raise ValueError("it makes bytes of something else")
        return b""

    def _size(self, sizes: Any = ()) -> torch.Size:
        self._take(_OBJECT * len(sizes))
        return torch.Size(_numbers(sizes))

    def _device(self, kind: Any, index: Any = None) -> torch.device:
        return torch.device(str(kind)) if index is None else torch.device(str(kind), int(index))

    # ------------------------------------------------------------ tensors

    def _persistent(self) -> None:
        reference = self._pop(tuple)
        if len(reference) != 5 or reference[0] != "storage" or not isinstance(reference[1], _Name):
            raise ValueError("it refers to something outside that is no storage")
        _, kind, key, location, count = reference
        if kind.name not in _STORAGES or not isinstance(key, str) or not isinstance(location, str):
            raise ValueError("it refers to a storage of an unknown kind")
        dtype, (count,) = _STORAGES[kind.name], _numbers([count])
        size = count * (1 if dtype is None else dtype.itemsize)
        if key not in self._storages:
            self._storages[key] = _Storage(key, self._load(key, size, location), dtype)
        storage = self._storages[key]
        if storage.dtype is not dtype or storage.data.nbytes() != size:
            raise ValueError(f"it refers to the storage {key!r} in two ways")
        self._push(storage)

    def _tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
        """``torch._utils._rebuild_tensor_v2``: then whether it requires a gradient, its hooks, and metadata."""
        dtype = storage.dtype if isinstance(storage, _Storage) else None
        if dtype is None or len(rest) > 3 or any(rest[1:]):
            raise ValueError("it holds a tensor that is no plain one")
        return self._view(storage, dtype, offset, sizes, strides, *rest[:1])

    def _typed_tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
        """``torch._utils._rebuild_tensor_v3``: then gradient, hooks, dtype and metadata."""
        plain = isinstance(storage, _Storage) and 3 <= len(rest) <= 4 and isinstance(rest[2], torch.dtype)
        if not plain or rest[1] or any(rest[3:]):
            raise ValueError("it holds a tensor that is no plain one")
        return self._view(storage, rest[2], offset, sizes, strides, rest[0])

    def _view(
        self, storage: _Storage, dtype: torch.dtype, offset: Any, sizes: Any, strides: Any, gradient: Any = False
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
            self._take(_TENSOR)
            empty = torch.empty(0, dtype=dtype, device=storage.data.device)
            self._views[key] = empty.set_(storage.data, offset, sizes, strides).requires_grad_(bool(gradient))  # type: ignore[call-overload]
        return self._views[key]

    def _parameter(self, data: Any, gradient: Any, hooks: Any, state: Any = None) -> nn.Parameter:
        if not isinstance(data, Tensor) or hooks:
            raise ValueError("it holds a parameter that is no plain one")
        self._take(_TENSOR)
        return nn.Parameter(data, bool(gradient))

    def _of_class(self, function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
        """``torch._tensor._rebuild_from_type_v2``: a tensor with attributes of its own, which are left out."""
        plain = isinstance(function, _Name) and function.name.startswith("torch._utils._rebuild_")
        if not plain or not isinstance(kind, _Name) or kind.name not in _TENSOR_CLASSES:
            raise ValueError("it holds a tensor that is no plain one")
        if not isinstance(arguments, tuple) or function.name not in _CALLS:
            raise ValueError("it holds a tensor that is no plain one")
        tensor: Tensor = _CALLS[function.name](self, *arguments)
        return tensor


def _numbers(sizes: Any) -> tuple[int, ...]:
    """Return sizes, strides or an offset, none of which is negative or more than memory can hold."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64:
        raise ValueError("it holds a tensor without a shape")
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("it holds a tensor with an impossible shape")
    return tuple(sizes)


def _vouched() -> dict[str, Any]:
    """Return what the user declared safe, by name."""
    names = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        names[name] = value
    return names


def _check_nesting(root: Any) -> None:
    """Refuse containers that hold themselves, or are in each other too deep for whoever goes through them.

    Each container is looked at once, however often it is referred to.
    """
    heights: dict[int, int] = {}
    path: list[tuple[Any, list[Any]]] = [(root, _children(root))]
    above = {id(root)}
    while path:
        item, children = path[-1]
        if children:
            child = children.pop()
            if id(child) in above or len(path) > _DEEPEST:
                raise ValueError("its containers hold themselves, or are nested too deep")
            if id(child) not in heights:
                above.add(id(child))
                path.append((child, _children(child)))
            continue
        path.pop()
        above.discard(id(item))
        heights[id(item)] = 1 + max((heights.get(id(child), 0) for child in _children(item)), default=0)
        if heights[id(item)] > _DEEPEST:
            raise ValueError("its containers are nested too deep")


def _children(item: Any) -> list[Any]:
    """Return the containers in a container; of an ordered dictionary, the metadata of a state dict too."""
    if isinstance(item, dict):
        inside = [*item.values(), *getattr(item, "__dict__", {}).values()]
    else:
        inside = list(item) if isinstance(item, (list, tuple)) else []
    return [value for value in inside if isinstance(value, (dict, list, tuple)) and value]


_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _Reader._ordered,
    "collections.Counter": _Reader._counter,
    "builtins.set": _Reader._set_of,
    "builtins.complex": _Reader._complex,
    "builtins.bytes": _Reader._empty_bytes,
    "_codecs.encode": _Reader._encoded,
    "torch.Size": _Reader._size,
    "torch.device": _Reader._device,
    "torch._utils._rebuild_tensor": _Reader._tensor,
    "torch._utils._rebuild_tensor_v2": _Reader._tensor,
    "torch._utils._rebuild_tensor_v3": _Reader._typed_tensor,
    "torch._utils._rebuild_parameter": _Reader._parameter,
    "torch._utils._rebuild_parameter_with_state": _Reader._parameter,
    "torch._tensor._rebuild_from_type_v2": _Reader._of_class,
}

# The instructions of protocol 2 that a pickler writes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
_INSTRUCTIONS: Mapping[bytes, Callable[[_Reader], None]] = {
    b"\x80": _Reader._protocol,
    b"N": lambda reader: reader._push(None, _ITEM),
    b"\x88": lambda reader: reader._push(True, _ITEM),
    b"\x89": lambda reader: reader._push(False, _ITEM),
    b"J": lambda reader: reader._push(reader._number("<i")),
    b"K": lambda reader: reader._push(reader._bytes(1)[0], _ITEM),
    b"M": lambda reader: reader._push(reader._number("<H")),
    b"\x8a": _Reader._long,
    b"G": lambda reader: reader._push(reader._number(">d")),
    b"X": lambda reader: reader._text(reader._number("<I")),
    b"U": lambda reader: reader._text(reader._bytes(1)[0], "latin-1"),
    b"T": lambda reader: reader._text(reader._number("<i"), "latin-1"),
    b")": lambda reader: reader._push((), _ITEM),
    b"]": lambda reader: reader._push([]),
    b"}": lambda reader: reader._push({}),
    b"(": _Reader._mark,
    b"t": _Reader._marked_tuple,
    b"\x85": lambda reader: reader._tuple(1),
    b"\x86": lambda reader: reader._tuple(2),
    b"\x87": lambda reader: reader._tuple(3),
    b"a": _Reader._append,
    b"e": _Reader._appends,
    b"s": _Reader._set_item,
    b"u": _Reader._set_items,
    b"q": lambda reader: reader._put(reader._bytes(1)[0]),
    b"r": lambda reader: reader._put(reader._number("<I")),
    b"h": lambda reader: reader._get(reader._bytes(1)[0]),
    b"j": lambda reader: reader._get(reader._number("<I")),
    b"c": _Reader._global,
    b"R": _Reader._call,
    b"\x81": _Reader._new,
    b"b": _Reader._build,
    b"Q": _Reader._persistent,
}
