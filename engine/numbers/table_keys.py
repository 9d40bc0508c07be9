"""Keys of tables in which running code may look up a size: decisions without a visible comparison."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, MappingProxyType
from typing import Any

from engine.limits import MOST_TABLE_KEYS

__all__ = ["Lookups"]

_TABLES = (dict, MappingProxyType, set, frozenset)


class Lookups:
    """Compares sizes that are hashed with the keys that they may be looking up.

    Python only compares a size with a key of equal hash, so looking up a size that is no key involves no comparison.
    The sizes in a tuple are hashed one by one: each only matters if the earlier ones agree with a key.

    Example:
        >>> import sys
        >>> lookups, table = Lookups(), {(12, 6): "small"}
        >>> frame = sys._getframe()
        >>> [sorted(lookups.keys(frame, size, {"table": table})) for size in (12, 9)]
        [[(6, 0), (12, 0)], [(6, 1), (12, 0)]]
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a run."""
        self._place: tuple[CodeType, int] | None = None
        self._before: tuple[int, ...] = ()

    def keys(self, frame: FrameType, size: int, names: dict[str, Any] | None = None) -> set[tuple[int, int]]:
        """Return the numbers to compare a size with, each with how many of the sizes before it agree with the key.

        Args:
            frame: frame of the code that hashes it.
            size: the size.
            names: variables of the frame; its own by default.
        """
        place = frame.f_code, frame.f_lineno
        before = self._before if place == self._place else ()
        self._place, self._before = place, (*before, size)[-8:]
        numbers: set[tuple[int, int]] = set()
        for key in {*_keys_in_code(frame.f_code), *_keys_in_tables(_tables(frame, names))}:
            for position, number in enumerate(key):
                agree = _agreement(before, key[:position])
                if agree or not position or not before:
                    numbers.add((number, agree))
        return numbers


def _agreement(sizes: tuple[int, ...], key: tuple[int, ...]) -> int:
    """Return how many sizes, counted from the last one, are the last numbers of a key."""
    lengths = range(min(len(sizes), len(key)), 0, -1)
    return next((n for n in lengths if sizes[-n:] == key[-n:]), 0)


@functools.cache
def _keys_in_code(code: CodeType) -> frozenset[tuple[int, ...]]:
    """Return the keys in displays of dictionaries and sets: constants of the code, among others of the same form.

    Small numbers are left out: most are dimensions and steps, and each costs a run at another size.
    """
    return frozenset(key for constant in code.co_consts for key in _constant_keys(constant) if key > (2,))


def _constant_keys(constant: Any) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of a constant as one key, and where several keys are one constant, each of them."""
    yield from _key(constant)
    for item in constant if isinstance(constant, (tuple, frozenset)) else ():
        yield from _constant_keys(item)


def _tables(frame: FrameType, names: dict[str, Any] | None) -> Iterator[Any]:
    """Yield the tables and sets in variables, attributes of the first argument and its class, and globals."""
    code, local = frame.f_code, frame.f_locals if names is None else names
    owner = local.get(code.co_varnames[0]) if code.co_argcount else None
    attributes = [getattr(owner, "__dict__", {}), *map(vars, type(owner).__mro__)]
    yield from (value for value in local.values() if isinstance(value, _TABLES))
    for name in code.co_names:
        for space in (frame.f_globals, *attributes):
            if isinstance(value := space.get(name), _TABLES):
                yield value


def _entries(table: Any) -> list[tuple[Any, Any]]:
    """Return keys and values; None for the values of a set. No method of a user's subclass runs."""
    if isinstance(table, dict):
        return list(dict.items(table))
    if isinstance(table, MappingProxyType):
        return list(table.items())
    return [(key, None) for key in (set if isinstance(table, set) else frozenset).__iter__(table)]


def _keys_in_tables(tables: Iterable[Any], depth: int = 2) -> Iterator[tuple[int, ...]]:
    """Yield the keys of tables; keys of a nested table follow the key that leads to it, if that consists of numbers."""
    for table in tables:
        for key, value in _entries(table) if len(table) <= MOST_TABLE_KEYS else ():
            own = next(_key(key), ())
            inner = [value] if isinstance(value, _TABLES) and depth else []
            yield from [own] if own else []
            yield from ((*own, *further) for further in _keys_in_tables(inner, depth - 1))


def _key(key: Any) -> Iterator[tuple[int, ...]]:
    """Yield a key of integers as a tuple."""
    numbers = key if isinstance(key, tuple) else (key,)
    if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        yield tuple(map(int.__int__, numbers))
