"""What lies in containers and objects, kept so that it can be put back bit for bit.

Nothing is written that did not change. What changed is written by the methods of the built-in type underneath: a class
of the user's may forbid changes, or do more than to store.
"""

from __future__ import annotations

import array
import functools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.program.garbage import uncollected

__all__ = ["Snapshot"]

_MOST = 20_000
_PYTHON = frozenset({"_contextvars", "_thread", "_weakref", "builtins", "collections", "functools", "types", "weakref"})
"""Objects that are looked into; what is further away from the model than so many others is not part of it."""

_LARGE = 10_000
"""Entries from which on a container is restored, and what lies in its entries is not."""

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
    *(types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.jit.ScriptModule, torch.Size),
    *(weakref.ref, np.dtype, np.generic),
)
_EXACT = frozenset(_ATOMS)
_RUNNING = frozenset(["asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "subprocess", "threading"])
"""Python modules whose objects belong to what runs beside the model."""


class _Kept(NamedTuple):
    """Something that may change, what was in it, and how to compare and to write it."""

    holder: Any
    content: Any
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]


class Snapshot:
    """What is in the containers and objects that can be reached from some values.

    Args:
        roots: where to start.
        owner: the model; an object that holds it is not part of it (a trainer), and not looked into.
        skip: what somebody else looks after.
        packages: whose objects are looked into, beside those of Python itself; all by default.

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
        self._seen: dict[int, Any] = {id(value): value for value in skip}
        self._kept: list[_Kept] = []
        self._kinds: dict[type, _Ways | None] = {}
        self._slots: dict[type, list[Any]] = {}
        waiting, most = deque(roots), _MOST + len(self._seen)
        with uncollected():  # what a collection frees leaves weak tables while they are read
            while waiting and len(self._seen) < most:
                value = waiting.popleft()
                if type(value) not in _EXACT and id(value) not in self._seen and not isinstance(value, _ATOMS):
                    self._seen[id(value)] = value
                    waiting.extend(self._look_into(value))

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

    def _look_into(self, value: Any) -> Iterable[Any]:
        """Keep what is in a value, and return what to look into next."""
        own = type(value)
        if own not in self._kinds:
            self._kinds[own] = next((row[1:] for row in _KINDS if isinstance(value, row[0])), None)
        ways = self._kinds[own]
        if ways is not None:
            content = ways[0](value)
            if content is None:
                return ()
            self._kept.append(_Kept(value, content, *ways[1:]))
        elif value is self._owner:
            return ()
        inner = _entries(value) if type(value) in _BUILT_IN else [*_entries(value), *self._attributes(value)]
        return inner if len(inner) < _LARGE else ()

    def _attributes(self, value: Any) -> Iterator[Any]:
        """Keep the attributes of an object, and yield those with slots of their own, and the table of the others."""
        if isinstance(value, Tensor) or not _is_own(value) or self._is_foreign(value) or self._holds_owner(value):
            return
        table = _table(value)
        if table is not None:
            self._kept.append(_Kept(value, table, lambda v, t: _table(v) is t, _set_table))
            yield table
        own = type(value)
        if own not in self._slots:
            self._slots[own] = list(_slots(own))
        for member in self._slots[own]:
            try:
                content = (member, member.__get__(value))
            except AttributeError:  # nothing is in it yet
                content = (member, _ABSENT)
            self._kept.append(_Kept(value, content, _same_slot, _write_slot))
            yield content[1]

    def _is_foreign(self, value: Any) -> bool:
        """Whether an object is of a class of another package than those that are looked into."""
        package = type(value).__module__.partition(".")[0]
        return self._packages is not None and package not in _PYTHON and package not in self._packages

    def _holds_owner(self, value: Any, depth: int = 3) -> bool:
        if self._owner is None or isinstance(value, (nn.Module, *_BUILT_IN)):
            return False
        for other in list((_table(value) or {}).values()):  # a look at one may fill another
            if other is self._owner or (depth and _table(other) is not None and self._holds_owner(other, depth - 1)):
                return True
        return False


class _Absent:
    """Stands for the value of a slot without one."""


_ABSENT = _Absent()


def _is_own(value: Any) -> bool:
    """Whether an object may be part of a model's state: no function's table, nothing that runs beside it."""
    kind = type(value)
    return kind.__name__ == "local" or kind.__module__.partition(".")[0].lstrip("_") not in _RUNNING


def _table(value: Any) -> dict[str, Any] | None:
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if type(table) is dict else None


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


def _base(value: Any) -> Any:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(_base(value).items(value))


def _same_items(value: Any, items: list[tuple[Any, Any]]) -> bool:
    if dict.__len__(value) != len(items):
        return False
    now = _base(value).items(value)
    return all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True))


def _write_items(value: Any, items: list[tuple[Any, Any]]) -> None:
    base = _base(value)
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)


def _same_sequence(value: Any, content: list[Any]) -> bool:
    now = deque.__iter__(value) if isinstance(value, deque) else list.__iter__(value)
    return len(value) == len(content) and all(a is b for a, b in zip(now, content, strict=False))


def _write_list(value: Any, content: list[Any]) -> None:
    list.__setitem__(value, slice(None), content)


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


def _write_bytes(value: Any, content: Any) -> None:
    value[:] = content


def _read_array(value: Any) -> Any:
    return value.copy() if value.flags.writeable and not value.dtype.hasobject else None


def _same_array(value: Any, content: Any) -> bool:
    return value.shape == content.shape and value.dtype == content.dtype and value.tobytes() == content.tobytes()


def _write_array(value: Any, content: Any) -> None:
    np.copyto(value, content)


def _read_tensor(value: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Return the memory that a tensor stands for, and what is in it; a fake one has none."""
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
    return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))


def _write_cell(value: Any, content: tuple[Any, ...]) -> None:
    if content:
        value.cell_contents = content[0]
    else:
        del value.cell_contents


def _write_generator(value: Any, state: Any) -> None:
    value.set_state(state)


def _same_state(value: Any, state: Any) -> bool:
    return repr(value.bit_generator.state) == repr(state)


def _write_state(value: Any, state: Any) -> None:
    value.bit_generator.state = state


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], bool], Callable[[Any, Any], None]]
_KINDS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], bool], Callable[[Any, Any], None]], ...] = (
    (dict, _items, _same_items, _write_items),
    (list, lambda v: list(list.__iter__(v)), _same_sequence, _write_list),
    (set, lambda v: set(set.__iter__(v)), _same_set, _write_set),
    (deque, lambda v: list(deque.__iter__(v)), _same_sequence, _write_deque),
    (Tensor, _read_tensor, _same_tensor, _write_tensor),
    (types.CellType, _read_cell, _same_cell, _write_cell),
    (bytearray, bytes, _same_bytes, _write_bytes),
    (array.array, lambda v: array.array(v.typecode, v), _same_bytes, _write_bytes),
    (np.ndarray, _read_array, _same_array, _write_array),
    (torch.Generator, lambda v: v.get_state(), lambda v, s: torch.equal(v.get_state(), s), _write_generator),
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


def _entries(value: Any) -> Sequence[Any]:
    """Return what lies in a container, or hangs on a function."""
    if isinstance(value, dict):
        return [part for pair in dict.items(value) for part in pair]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value.__iter__() if type(value) in _BUILT_IN else _iterated(value))
    if isinstance(value, types.MappingProxyType):
        return list(value.values())
    if isinstance(value, types.CellType):
        return _read_cell(value)
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    return [value.func, value.args, value.keywords] if isinstance(value, functools.partial) else ()


def _iterated(value: Any) -> Iterator[Any]:
    kind: Any = next(kind for kind in _BUILT_IN if isinstance(value, kind))
    entries: Iterator[Any] = kind.__iter__(value)
    return entries
