"""The functions behind what a class or a Python module holds under a name: properties, wrappers, partial functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from engine.source.static_attributes import table_of

__all__ = ["functions_behind", "is_of_torch"]

_PARTS = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")
_BUILT_IN = ("builtins", "functools")


def functions_behind(item: Any, python_module: str) -> Iterator[FunctionType]:
    """Yield the functions that may run where an item of a class or of a Python module is called or looked up.

    Decorators that say what they wrap are followed; where they do not, all functions of the Python module count that
    they hold in their closure or in their attributes.

    Args:
        item: a function, a property, a static method, a wrapper.
        python_module: name of the Python module in which the item stands.

    Example:
        >>> def logged(function):
        ...     return lambda *args: function(*args)
        >>> @logged
        ... def pick(items):
        ...     return items[0]
        >>> [function.__name__ for function in functions_behind(pick, __name__)]
        ['<lambda>', 'pick']
    """
    waiting, seen = [item], {id(item)}
    while waiting:
        thing = waiting.pop(0)
        held: list[Any] = []
        if isinstance(thing, FunctionType):
            yield thing
            held = [*_closure(thing), *vars(thing).values()]
        elif not isinstance(thing, type):
            held = list(table_of(thing).values())
        parts = [getattr(thing, part, None) for part in _PARTS] if type(thing).__module__ in _BUILT_IN else []
        own = [other for other in held if _is_of(other, python_module)]
        for other in (*parts, *own):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # of a function that is not defined yet
            continue


def _is_of(thing: Any, python_module: str) -> bool:
    """Whether something is, or wraps, a function of a Python module."""
    wraps = isinstance(thing, (property, staticmethod, classmethod, functools.partial, functools.partialmethod))
    return wraps or (isinstance(thing, FunctionType) and thing.__module__ == python_module)


def is_of_torch(cls: type) -> bool:
    """Whether a class is one of torch's layers, or the base of all classes.

    Example:
        >>> from torch import nn
        >>> is_of_torch(nn.Linear), is_of_torch(object), is_of_torch(int)
        (True, True, False)
    """
    return cls is object or cls.__module__.startswith("torch.nn")
