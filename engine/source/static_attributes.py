"""Attributes of Python modules and classes, looked up without running any code of theirs.

A module may import something when an attribute is first read (``__getattr__``, a subclass of `types.ModuleType`), and a
class may be a placeholder for one that is not installed. Analysing a model must neither import anything nor fail with
an error of such code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from engine.source.function_text import syntax_of

__all__ = [
    "attribute_code",
    "attribute_of_a_part",
    "method_code",
    "static_attribute",
    "stored_by_property",
    "table_of",
]


def static_attribute(holder: ModuleType | type, name: str, default: Any = None) -> Any:
    """Return what a Python module or a class holds under a name, without running any code.

    Args:
        holder: the module or class.
        name: of the attribute; of a static or class method, the function is returned.
        default: what is returned if the holder has nothing there yet.

    Example:
        >>> import math
        >>> static_attribute(math, "pi") == math.pi, static_attribute(math, "tau_over_two", 0)
        (True, 0)
    """
    if isinstance(holder, ModuleType):
        return table_of(holder).get(name, default)
    held = inspect.getattr_static(holder, name, default)
    return held.__func__ if isinstance(held, (staticmethod, classmethod)) else held


def attribute_of_a_part(holder: ModuleType, name: str) -> Any:
    """Return the attribute of a loaded part of a package; None if no part has it.

    Packages that import their parts lazily expose the parts' attributes as their own.

    Args:
        holder: the package.
        name: of the attribute.

    Example:
        >>> import concurrent, concurrent.futures.thread
        >>> attribute_of_a_part(concurrent, "ThreadPoolExecutor") is concurrent.futures.ThreadPoolExecutor
        True
    """
    start = f"{table_of(holder).get('__name__')}."
    if start + name in sys.modules:
        return sys.modules[start + name]
    parts = [table_of(module) for key, module in list(sys.modules.items()) if key.startswith(start)]
    return next((part[name] for part in parts if name in part), None)


def table_of(holder: Any) -> Mapping[str, Any]:
    """Return the table of attributes of an object; an empty one where it has none, as ``None`` in `sys.modules`.

    Args:
        holder: anything; neither ``__getattr__`` nor a property of it runs.

    Example:
        >>> "table_of" in table_of(sys.modules[table_of.__module__]), len(table_of(None))
        (True, 0)
    """
    try:
        table = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return table if isinstance(table, Mapping) else {}


def attribute_code(kind: type, name: str) -> FunctionType | None:
    """Return the function of a property, and None for a stored attribute.

    Example:
        >>> class Net:
        ...     @property
        ...     def wide(self):
        ...         return self.width > 8
        >>> attribute_code(Net, "wide").__name__, attribute_code(Net, "width")
        ('wide', None)
    """
    held = inspect.getattr_static(kind, name, None)
    function = held.func if isinstance(held, functools.cached_property) else getattr(held, "fget", None)
    if not isinstance(function, FunctionType) or str(function.__module__).startswith("torch.nn."):
        return None
    return function


@functools.cache
def stored_by_property(kind: Any, name: str) -> str | None:
    """Return the attribute that a property returns as it is, and None for any other member of a class.

    Example:
        >>> class Config:
        ...     @property
        ...     def attention(self):
        ...         return self._attention
        >>> stored_by_property(Config, "attention")
        '_attention'
    """
    function = attribute_code(kind, name)
    tree = None if function is None else syntax_of(function.__code__)
    body = [] if tree is None else tree.body[ast.get_docstring(tree) is not None :]
    match body:
        case [ast.Return(value=ast.Attribute(value=ast.Name(id="self"), attr=str(stored)))]:
            return stored
    return None


def method_code(owner: object, name: str) -> FunctionType | None:
    """Return the function of a method that the class of an object defines, and None for any other attribute.

    Example:
        >>> class Net:
        ...     def has_mask(self):
        ...         return self.mask is not None
        >>> method_code(Net(), "has_mask").__name__, method_code(Net(), "forward_hook")
        ('has_mask', None)
    """
    held = None if name in getattr(owner, "__dict__", {}) else inspect.getattr_static(type(owner), name, None)
    own = isinstance(held, FunctionType) and not str(held.__module__).startswith("torch.nn.")
    return held if own else None
