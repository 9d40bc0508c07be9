"""Reader for the pickle in a file of ``torch.save`` that only accepts allowed content.

Neither `pickle` nor torch's reader for ``weights_only=True`` limits what it builds: a few bytes may encode a string
again and again, a memo of billions of entries, or a tensor that repeats four bytes. This reader knows the instructions
that `torch.save` writes, builds only tensors and plain values, and counts their memory against a limit for the file.
Classes and functions that the user declared safe with ``torch.serialization.add_safe_globals`` are called as in torch.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from engine.files.builder import CALLS, DTYPES, ITEM, OBJECT, STORAGES, TENSOR_CLASSES, Builder, Load, Name
from engine.files.nesting import check_nesting

__all__ = ["Reader", "unpickled"]

_LONGEST = 64  # maximum bytes of an integer


class _Vouched:
    """A class or function that the user has declared safe."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unpickled(data: bytes, load: Load, memory: int, claims: int) -> Any:
    """Return the content of a pickle of ``torch.save``.

    Args:
        data: the pickle.
        load: reads a storage; called once per storage.
        memory: maximum memory of objects in bytes, without storages.
        claims: maximum total size in bytes of all different tensors.

    Raises:
        ValueError: if it contains something other than plain values and tensors, or exceeds a limit.
    """
    return Reader(data, load, memory, claims).read()


class Reader:
    """Interpreter of the instructions of a pickle, with a stack, marks and a memo.

    For the arguments see `unpickled`.
    """

    instructions: Mapping[bytes, Callable[[Any], None]]
    protocols: Collection[int] = (2,)

    def __init__(self, data: bytes, load: Load, memory: int, claims: int) -> None:
        self._data, self._place = data, 0
        self._builder = Builder(load, memory, claims)
        self._take = self._builder.take
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._vouched = _vouched()

    def read(self) -> Any:
        """Return the content of the pickle."""
        while True:
            instruction = self._bytes(1)
            if instruction == b".":
                return self._finished()
            run = self.instructions.get(instruction)
            if run is None:
                raise ValueError(f"it contains the instruction {instruction!r}, which torch does not write")
            run(self)

    def _finished(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise ValueError("its pickle ends in the middle")
        check_nesting(self._stack[0])
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
            raise ValueError("its pickle contains an unterminated name")
        line = self._bytes(end - self._place).decode("ascii")
        self._place += 1
        return line

    def _push(self, value: Any, size: int = OBJECT) -> None:
        self._take(size)
        self._stack.append(value)

    def _pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self._stack:
            raise ValueError("its pickle takes a missing value from the stack")
        value = self._stack.pop()
        if not isinstance(value, kind):
            raise ValueError(f"its pickle contains a misplaced {type(value).__name__}")
        return value

    def _top(self, kind: type | tuple[type, ...]) -> Any:
        value = self._pop(kind)
        self._stack.append(value)
        return value

    # ------------------------------------------------------------ plain values

    def _text(self, size: int, encoding: str = "utf-8") -> None:
        raw = self._bytes(size)
        self._push(raw.decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict"), 4 * size + OBJECT)

    def _long(self) -> None:
        size = self._bytes(1)[0]
        if size > _LONGEST:
            raise ValueError("it contains an integer of an implausible size")
        self._push(int.from_bytes(self._bytes(size), "little", signed=True))

    def _protocol(self) -> None:
        if self._bytes(1)[0] not in self.protocols:
            raise ValueError(f"its pickle has another protocol than {min(self.protocols)}, which torch writes")

    # ------------------------------------------------------------ memo and containers

    def _put(self, index: int) -> None:
        if index not in self._memo:
            self._take(OBJECT)
        self._memo[index] = self._top(object)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise ValueError("its pickle refers to a missing memo entry")
        self._push(self._memo[index], ITEM)

    def _mark(self) -> None:
        self._take(OBJECT)
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle refers to a missing mark")
        items, self._stack = self._stack, self._marks.pop()
        self._take(ITEM * len(items) - OBJECT)  # the mark is gone
        return items

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)), OBJECT + ITEM * count)

    def _marked_tuple(self) -> None:
        self._push(tuple(self._marked()))

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)
        self._take(ITEM)

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
            raise ValueError("its pickle contains a key without a value")
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._take(OBJECT)
            target[self._key(key)] = value

    def _key(self, key: Any) -> Any:
        return self._builder.key(key)

    # ------------------------------------------------------------ classes, functions and calls

    def _global(self) -> None:
        self._push(self._named(f"{self._line()}.{self._line()}".replace("__builtin__.", "builtins.")))

    def _named(self, name: str) -> Any:
        """Return the placeholder of a class or function."""
        if name in DTYPES:
            return DTYPES[name]
        if name in CALLS or name in STORAGES or name in TENSOR_CLASSES:
            return Name(name)
        if name in self._vouched:
            return _Vouched(self._vouched[name])
        raise ValueError(
            f"it contains {name}, which is neither a plain value nor a tensor; declare it with "
            "`torch.serialization.add_safe_globals` if you trust the file"
        )

    def _call(self) -> None:
        arguments = self._pop(tuple)
        function = self._pop((Name, _Vouched))
        if isinstance(function, _Vouched):
            self._push(function.value(*arguments))
        elif function.name in CALLS:
            self._push(CALLS[function.name](self._builder, *arguments))
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

    def _persistent(self) -> None:
        self._push(self._builder.storage(self._pop(tuple)))


def _vouched() -> dict[str, Any]:
    """Return the classes and functions that the user declared safe, by name."""
    names = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        names[name] = value
    return names


# The instructions of protocol 2 that a pickler writes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
Reader.instructions = {
    b"\x80": Reader._protocol,
    b"N": lambda reader: reader._push(None, ITEM),
    b"\x88": lambda reader: reader._push(True, ITEM),
    b"\x89": lambda reader: reader._push(False, ITEM),
    b"J": lambda reader: reader._push(reader._number("<i")),
    b"K": lambda reader: reader._push(reader._bytes(1)[0], ITEM),
    b"M": lambda reader: reader._push(reader._number("<H")),
    b"\x8a": Reader._long,
    b"G": lambda reader: reader._push(reader._number(">d")),
    b"X": lambda reader: reader._text(reader._number("<I")),
    b"U": lambda reader: reader._text(reader._bytes(1)[0], "latin-1"),
    b"T": lambda reader: reader._text(reader._number("<i"), "latin-1"),
    b")": lambda reader: reader._push((), ITEM),
    b"]": lambda reader: reader._push([]),
    b"}": lambda reader: reader._push({}),
    b"(": Reader._mark,
    b"t": Reader._marked_tuple,
    b"\x85": lambda reader: reader._tuple(1),
    b"\x86": lambda reader: reader._tuple(2),
    b"\x87": lambda reader: reader._tuple(3),
    b"a": Reader._append,
    b"e": Reader._appends,
    b"s": Reader._set_item,
    b"u": Reader._set_items,
    b"q": lambda reader: reader._put(reader._bytes(1)[0]),
    b"r": lambda reader: reader._put(reader._number("<I")),
    b"h": lambda reader: reader._get(reader._bytes(1)[0]),
    b"j": lambda reader: reader._get(reader._number("<I")),
    b"c": Reader._global,
    b"R": Reader._call,
    b"\x81": Reader._new,
    b"b": Reader._build,
    b"Q": Reader._persistent,
}
