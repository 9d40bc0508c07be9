"""Snapshots of the contents of containers and objects, which can be restored bit for bit.

Only changes are written back, by the methods of the underlying built-in type, because a user's class may forbid
changes, or do more than store them.
"""

from __future__ import annotations

import array
import builtins
import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.limits import MOST_OBJECTS, MOST_RESTORED_ENTRIES
from engine.program.garbage import uncollected

__all__ = ["Snapshot"]


_PYTHON = frozenset({"_contextvars", "_thread", "_weakref", "builtins", "collections", "functools", "types", "weakref"})


_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
    *(types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.jit.ScriptModule, torch.Size),
    *(weakref.ref, np.dtype, np.generic),
)
_EXACT = frozenset(_ATOMS)
_RUNNING = frozenset(["asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "subprocess", "threading"])
"""Python modules whose objects belong to the process rather than to the model."""


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], bool], Callable[[Any, Any], Any]]


class _Kind(NamedTuple):
    """How to handle the objects of a class, computed once per class.

    Attributes:
        ways: how to read, compare and write the content; None if the class stores nothing itself.
        entries: returns the items of an object.
        attributes: whether to visit the attributes.
        slots: the attributes that are slots, and not entries of a table.
        may_hold: whether an object may hold the model, and so is not part of it.
    """

    ways: _Ways | None
    entries: Callable[[Any], Sequence[Any]]
    attributes: bool
    slots: Sequence[Any]
    may_hold: bool


class _Kept(NamedTuple):
    """An object that may change, its content, and how to compare and write this."""

    holder: Any
    content: Any
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], Any]


class Snapshot:
    """The contents of all containers and objects reachable from some values.

    Args:
        roots: where to start.
        owner: the model; an object that holds it (a trainer) is not part of it, and not visited.
        skip: objects that are restored elsewhere.
        packages: packages whose objects are visited, besides those of Python itself; all by default.

    Example:
        >>> cache = {"sizes": [1, 2]}
        >>> snapshot = Snapshot([cache])
        >>> cache["sizes"].append(3)
        >>> cache["new"] = None
        >>> snapshot.restore()
        >>> cache
        {'sizes': [1, 2]}
    """

    def __init__(
        self,
        roots: Iterable[Any],
        owner: nn.Module | None = None,
        skip: Iterable[Any] = (),
        packages: Container[str] | None = None,
    ) -> None:
        self._owner, self._packages = owner, packages
        # Python's own tables are no part of a model, and nothing runs while they are written
        self._seen: dict[int, Any] = {id(value): value for value in (*skip, vars(builtins), sys.modules)}
        self._kept: list[_Kept] = []
        self._kinds: dict[type, _Kind | None] = {}
        waiting, most = deque(roots), MOST_OBJECTS + len(self._seen)
        with uncollected():  # what a collection frees leaves weak tables while they are read
            while waiting and len(self._seen) < most:
                value = waiting.popleft()
                if id(value) not in self._seen and (kind := self._kind_of(type(value))) is not None:
                    self._seen[id(value)] = value
                    waiting.extend(inner for inner in self._look_into(value, kind) if type(inner) not in _EXACT)

    def differs(self) -> bool:
        """Whether anything changed."""
        with uncollected():
            return any(not same(holder, content) for holder, content, same, _ in self._kept)

    def restore(self) -> None:
        """Put back what changed."""
        with uncollected():
            for holder, content, same, write in self._kept:
                if not same(holder, content):
                    write(holder, content)

    def _kind_of(self, own: type) -> _Kind | None:
        """Return how to handle the objects of a class; None if they have no content."""
        if own not in self._kinds:
            self._kinds[own] = None if issubclass(own, _ATOMS) else self._new_kind(own)
        return self._kinds[own]

    def _new_kind(self, own: type) -> _Kind:
        package = str(own.__module__).partition(".")[0]
        foreign = self._packages is not None and package not in _PYTHON and package not in self._packages
        return _Kind(
            ways=next((row[1:] for row in _KINDS if issubclass(own, row[0])), None),
            entries=next((read for kinds, read in _ENTRIES if issubclass(own, kinds)), lambda v: ()),
            attributes=own not in _BUILT_IN and not issubclass(own, Tensor) and _is_own(own) and not foreign,
            slots=list(_slots(own)),
            may_hold=self._owner is not None and not issubclass(own, (nn.Module, *_BUILT_IN)),
        )

    def _look_into(self, value: Any, kind: _Kind) -> Sequence[Any]:
        """Keep the content of a value, and return the objects to visit next."""
        if kind.ways is not None:
            content = kind.ways[0](value)
            if content is None:
                return ()
            self._kept.append(_Kept(value, content, *kind.ways[1:]))
        elif value is self._owner:
            return ()
        inner = kind.entries(value)
        if kind.attributes and not (kind.may_hold and self._holds_owner(value)):
            inner = [*inner, *self._attributes(value, kind)]
        return inner if len(inner) < MOST_RESTORED_ENTRIES else ()

    def _attributes(self, value: Any, kind: _Kind) -> Iterator[Any]:
        """Keep the attributes of an object, and yield those in slots, and the table of the others."""
        table = _table(value)
        if table is not None:
            self._kept.append(_Kept(value, table, _same_table, _set_table))
            yield table
        for member in kind.slots:
            try:
                content = (member, member.__get__(value))
            except AttributeError:  # nothing is in it yet
                content = (member, _ABSENT)
            self._kept.append(_Kept(value, content, _same_slot, _write_slot))
            yield content[1]

    def _holds_owner(self, value: Any, depth: int = 3) -> bool:
        for other in list((_table(value) or {}).values()):  # looking at one may fill another
            held = vars(other).values() if isinstance(other, types.ModuleType) else [other]
            if any(value is self._owner for value in list(held)):
                return True
            kind = self._kind_of(type(other)) if depth else None
            if kind is not None and kind.may_hold and self._holds_owner(other, depth - 1):
                return True
        return False


class _Absent:
    """Stands for the value of an empty slot."""


_ABSENT = _Absent()


def _is_own(kind: type) -> bool:
    """Whether an object may be part of a model's state, and not of a function or of the process."""
    return kind.__name__ == "local" or str(kind.__module__).partition(".")[0].lstrip("_") not in _RUNNING


def _table(value: Any) -> dict[str, Any] | None:
    if not type(value).__dictoffset__:
        return None
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if type(table) is dict else None


def _same_table(value: Any, table: dict[str, Any]) -> bool:
    return _table(value) is table


def _set_table(value: Any, table: dict[str, Any]) -> None:
    object.__setattr__(value, "__dict__", table)


def _slots(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (m for m in vars(base).values() if isinstance(m, types.MemberDescriptorType))


def _same_slot(value: Any, content: tuple[Any, Any]) -> bool:
    try:
        return content[0].__get__(value) is content[1]
    except AttributeError:
        return content[1] is _ABSENT


def _write_slot(value: Any, content: tuple[Any, Any]) -> None:
    member, before = content
    member.__delete__(value) if before is _ABSENT else member.__set__(value, before)


# ---------------------------------------------------------------- the built-in types underneath


def _entries_kept(base: Any) -> _Ways:
    """Return how to read, compare and write a dictionary, by the methods of its base class."""

    def read(value: Any) -> tuple[list[Any], list[Any]]:
        return list(base.keys(value)), list(base.values(value))

    def same(value: Any, content: tuple[list[Any], list[Any]]) -> bool:
        keys, items = content
        return (
            dict.__len__(value) == len(keys)
            and all(map(operator.is_, base.keys(value), keys))
            and all(map(operator.is_, base.values(value), items))
        )

    def write(value: Any, content: tuple[list[Any], list[Any]]) -> None:
        entries = list(zip(*content, strict=True))
        base.clear(value)
        for key, item in entries:
            base.__setitem__(value, key, item)

    return read, same, write


def _same_sequence(value: Any, content: list[Any]) -> bool:
    now = deque.__iter__(value) if isinstance(value, deque) else list.__iter__(value)
    return len(value) == len(content) and all(map(operator.is_, now, content))


def _write_deque(value: Any, content: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, content)


def _same_set(value: Any, content: set[Any]) -> bool:
    return set.__len__(value) == len(content) and {id(e) for e in set.__iter__(value)} == {id(e) for e in content}


def _write_set(value: Any, content: set[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _same_bytes(value: Any, content: Any) -> bool:
    return bytes(value) == bytes(content)


def _read_array(value: Any) -> Any:
    return value.copy() if value.flags.writeable and not value.dtype.hasobject else None


def _same_array(value: Any, content: Any) -> bool:
    return value.shape == content.shape and value.dtype == content.dtype and value.tobytes() == content.tobytes()


def _read_tensor(value: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Return the memory that a tensor stands for, and its content; a fake tensor has none."""
    plain = value.layout is torch.strided and not isinstance(value, FakeTensor) and not value.is_quantized
    if not plain or type(value) not in (Tensor, nn.Parameter):
        return None
    with torch.no_grad():
        data = value.detach()
        return data, data if data.is_meta else data.clone(), value.requires_grad


def _same_tensor(value: Tensor, content: tuple[Tensor, Tensor, bool]) -> bool:
    data, before, requires_grad = content
    there = value.shape == data.shape and value.stride() == data.stride() and value.dtype is data.dtype
    if not there or value.requires_grad is not requires_grad or value.data_ptr() != data.data_ptr():
        return False
    with torch.no_grad():
        return data.is_meta or _same_numbers(data, before)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point() or one.is_complex():
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return torch.equal(one, other)


def _write_tensor(value: Tensor, content: tuple[Tensor, Tensor, bool]) -> None:
    data, before, requires_grad = content
    with torch.no_grad():
        if not data.is_meta and not _same_numbers(data, before):
            data.copy_(before)
        if value.data_ptr() != data.data_ptr() or value.shape != data.shape or value.dtype is not data.dtype:
            value.data = data
    if value.is_leaf and value.requires_grad is not requires_grad:
        value.requires_grad_(requires_grad)


def _read_cell(value: Any) -> tuple[Any, ...]:
    try:
        return (value.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


def _same_cell(value: Any, content: tuple[Any, ...]) -> bool:
    now = _read_cell(value)
    return len(now) == len(content) and all(map(operator.is_, now, content))


def _write_cell(value: Any, content: tuple[Any, ...]) -> None:
    if content:
        value.cell_contents = content[0]
    else:
        del value.cell_contents


def _same_state(value: Any, state: Any) -> bool:
    return repr(value.bit_generator.state) == repr(state)


def _write_state(value: Any, state: Any) -> None:
    value.bit_generator.state = state


_KINDS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], bool], Callable[[Any, Any], Any]], ...] = (
    (OrderedDict, *_entries_kept(OrderedDict)),
    (dict, *_entries_kept(dict)),
    (list, lambda v: list(list.__iter__(v)), _same_sequence, lambda v, c: list.__setitem__(v, slice(None), c)),
    (set, lambda v: set(set.__iter__(v)), _same_set, _write_set),
    (deque, lambda v: list(deque.__iter__(v)), _same_sequence, _write_deque),
    (Tensor, _read_tensor, _same_tensor, _write_tensor),
    (types.CellType, _read_cell, _same_cell, _write_cell),
    (bytearray, bytes, _same_bytes, lambda v, c: v.__setitem__(slice(None), c)),
    (array.array, lambda v: array.array(v.typecode, v), _same_bytes, lambda v, c: v.__setitem__(slice(None), c)),
    (np.ndarray, _read_array, _same_array, np.copyto),
    (torch.Generator, torch.Generator.get_state, lambda v, s: torch.equal(v.get_state(), s), torch.Generator.set_state),
    (random.Random, lambda v: v.getstate(), lambda v, s: v.getstate() == s, lambda v, s: v.setstate(s)),
    (np.random.Generator, lambda v: v.bit_generator.state, _same_state, _write_state),
    (
        np.random.RandomState,
        lambda v: v.get_state(legacy=False),
        lambda v, s: repr(v.get_state(legacy=False)) == repr(s),
        lambda v, s: v.set_state(s),
    ),
)
_BUILT_IN = (dict, list, set, deque, tuple, frozenset)


def _parts(value: Any) -> list[Any]:
    return [*dict.keys(value), *dict.values(value)]


def _items(value: Any) -> list[Any]:
    kind: Any = next(kind for kind in _BUILT_IN if isinstance(value, kind))
    return list(kind.__iter__(value))


def _of_function(value: types.FunctionType) -> list[Any]:
    return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


_ENTRIES: tuple[tuple[Any, Callable[[Any], Sequence[Any]]], ...] = (
    (dict, _parts),
    ((list, tuple, set, frozenset, deque), _items),
    (types.MappingProxyType, lambda v: list(v.values())),
    (types.CellType, _read_cell),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda v: [v.__self__, v.__func__]),
    (functools.partial, lambda v: [v.func, v.args, v.keywords]),
)
"""Returns the items of a container, or the objects attached to a function, by type."""
