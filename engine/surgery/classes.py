"""Classes created at run time that replace a module's own class; they and their instances can be pickled."""

from __future__ import annotations

import ast
import copyreg
import linecache
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["compiled", "derived", "legible", "moved", "namespace", "original"]


def derived(
    cls: type[nn.Module],
    members: Mapping[str, Any],
    maker: Callable[..., type[nn.Module]],
    *recipe: Any,
    beside: type[nn.Module] | None = None,
) -> type[nn.Module]:
    """Return a subclass under the name of its base class.

    Pickle looks classes up by name, and this one has the name of another. It is pickled as the call that creates it.

    Args:
        cls: the base class.
        members: attributes and methods of the subclass. Attributes begin with ``_engine_``: the base class, its
            subclasses and its instances may have any other.
        maker: a function of a Python module that returns the subclass, given ``cls`` and the recipe.
        recipe: further arguments of ``maker``, which can be pickled.
        beside: the class that ``super()`` refers to in the forward of ``cls``, instead of its base class.
    """
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_engine_made_by": (maker, (cls, *recipe))}
    bases = (cls,) if beside is None else (cls, beside)
    subclass: type[nn.Module] = _metaclass(type(cls))(cls.__name__, bases, {**members, **own})
    return subclass


_metaclasses: dict[type, Any] = {}


def _metaclass(base: type) -> Any:
    if base in _metaclasses:
        return _metaclasses[base]
    metaclass = type(base.__name__, (base,), {})
    copyreg.pickle(metaclass, _call)
    _metaclasses[base] = metaclass
    return metaclass


def original(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that the user wrote, if this one replaced it.

    Example:
        >>> original(nn.Linear)
        <class 'torch.nn.modules.linear.Linear'>
    """
    while "_engine_made_by" in vars(cls):
        cls = vars(cls)["_engine_made_by"][1][0]
    return cls


def moved(function: FunctionType, label: str, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function that sees other objects under some global names.

    Args:
        function: without a closure.
        label: distinguishes its namespace from others derived from the function's.
        names: the objects by name.
    """
    new_function = FunctionType(function.__code__, namespace(function, label, names), function.__name__)
    new_function.__defaults__, new_function.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new_function.__qualname__, new_function.__annotations__ = function.__qualname__, function.__annotations__
    return new_function


def namespace(function: FunctionType, label: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's globals with other objects under some names.

    They belong to a registered Python module of their own, in which torch.compile looks names up.
    """
    space = ModuleType(f"{function.__module__}.{label}")
    vars(space).update({**function.__globals__, **names, "__name__": space.__name__})
    sys.modules[space.__name__] = space
    return vars(space)


def compiled(source: ast.Module | str, name: str) -> CodeType:
    """Compile without evaluating annotations, whose names may only be known to a type checker."""
    code: CodeType = compile(source, name, "exec", flags=annotations.compiler_flag, dont_inherit=True)
    return code


def legible(text: str, label: str, function: FunctionType) -> FunctionType:
    """Recompile a rebuilt function from text that `inspect` can return: TorchScript reads text, not code.

    The running code keeps the positions of the user's text, to which pins refer.
    """
    name = f"<{function.__module__}.{label}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compiled(text, name), function.__globals__, space)
    new_function: FunctionType = space[function.__name__]
    new_function.__defaults__, new_function.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new_function.__annotations__ = function.__annotations__
    return new_function


def _call(cls: Any) -> tuple[Callable[..., type], tuple[Any, ...]]:
    reduction: tuple[Callable[..., type], tuple[Any, ...]] = cls._engine_made_by
    return reduction
