"""The functions behind a name in a class or a Python module: in properties, wrappers, partial functions, tables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from engine.limits import MOST_TABLE_ITEMS
from engine.source.static_attributes import table_of

__all__ = ["functions_behind", "is_of_torch", "signature_of", "unwrapped"]

_PARTS = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")
_BUILT_IN = ("builtins", "functools")
_WRAPPERS = (property, staticmethod, classmethod, functools.partial, functools.partialmethod)
_CONTAINERS = (Mapping, list, tuple, set, frozenset)


def functions_behind(item: Any, python_module: str) -> Iterator[FunctionType]:
    """Yield the functions that may run when an item of a class or of a Python module is called or looked up.

    Decorators that set ``__wrapped__`` are followed; for others, all functions of the same Python module count that
    they hold in their closure, in their attributes, or in a container there.

    Args:
        item: a function, a property, a static method, a wrapper, a table of functions.
        python_module: name of the Python module that contains the item.

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
        obj = waiting.pop(0)
        if isinstance(obj, FunctionType):
            yield obj
        parts = [getattr(obj, part, None) for part in _PARTS] if type(obj).__module__ in _BUILT_IN else []
        own = [other for other in _held_by(obj) if _is_of(other, python_module)]
        for other in (*parts, *own):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)


def _held_by(obj: Any) -> Iterable[Any]:
    """Return what a function, a container or an object holds; nothing of large containers, classes, Python modules."""
    if isinstance(obj, FunctionType):
        return [*_closure(obj), *vars(obj).values()]
    if isinstance(obj, _CONTAINERS):
        if len(obj) > MOST_TABLE_ITEMS:
            return ()
        return list(obj.values()) if isinstance(obj, Mapping) else list(obj)
    return () if isinstance(obj, (type, ModuleType)) else list(table_of(obj).values())


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # of a function that is not defined yet
            continue


def _is_of(obj: Any, python_module: str) -> bool:
    """Whether something is a function of a Python module, or may hold one."""
    if isinstance(obj, FunctionType):
        return obj.__module__ == python_module
    return _holds_functions(type(obj))  # type: ignore[arg-type]


@functools.cache
def _holds_functions(kind: type) -> bool:
    """Whether objects of a class are wrappers or containers; thousands of objects have a few classes."""
    return issubclass(kind, (*_WRAPPERS, *_CONTAINERS))


def unwrapped(function: Any) -> Any:
    """Return the function behind decorators, also behind one without ``__wrapped__`` if the function is a method.

    Args:
        function: any object; anything but a function is returned unchanged.

    Example:
        >>> def logged(function):
        ...     return lambda *args: function(*args)
        >>> class Net:
        ...     @logged
        ...     def forward(self, x):
        ...         return x
        >>> unwrapped(Net.forward).__name__
        'forward'
    """
    while True:
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, FunctionType) or _is_method(function):
            return function
        methods = [held for held in _closure(function) if isinstance(held, FunctionType) and _is_method(held)]
        if len(methods) != 1:
            return function
        function = methods[0]


def _is_method(function: FunctionType) -> bool:
    """Whether a function was defined in the body of a class."""
    around = function.__qualname__.rpartition(".")[0]
    return bool(around) and not around.endswith("<locals>")


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or a bound method behind its decorators.

    Args:
        call: the function or the method.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(call, MethodType) and isinstance(function := unwrapped(call.__func__), FunctionType):
        return inspect.signature(MethodType(function, call.__self__))
    return inspect.signature(unwrapped(call))


def is_of_torch(cls: type) -> bool:
    """Whether a class is one of torch's layers, or the base of all classes.

    Example:
        >>> from torch import nn
        >>> is_of_torch(nn.Linear), is_of_torch(object), is_of_torch(int)
        (True, True, False)
    """
    return cls is object or cls.__module__.startswith("torch.nn")
