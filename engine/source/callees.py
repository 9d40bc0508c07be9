"""The functions that a call runs: attributes, items of containers and methods, looked up without running code."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from engine.source.decorated import unwrapped
from engine.source.static_attributes import attribute_of_a_part, static_attribute

__all__ = ["attribute_of", "functions_run_by", "inherited", "items", "own_calls", "parts"]


def inherited(owner: nn.Module, code: CodeType, name: str) -> Iterator[MethodType]:
    """Yield the method that ``super()`` finds in a method of an object's class."""
    order = type(owner).__mro__
    own = (base for base in order if any(_code_of(candidate) is code for candidate in vars(base).values()))
    start = next((order.index(base) + 1 for base in own), len(order))
    for function in (vars(base)[name] for base in order[start:] if name in vars(base)):
        if isinstance(function, FunctionType):
            yield MethodType(function, owner)
        return


def _code_of(candidate: Any) -> CodeType | None:
    return getattr(unwrapped(candidate), "__code__", None) if isinstance(candidate, FunctionType) else None


def parts(value: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression, and the arguments of ``enumerate``, ``zip`` and the like."""
    yield value
    for argument in value.args if isinstance(value, ast.Call) else ():
        yield from parts(argument)


def attribute_of(candidate: Any, name: str) -> Any:
    """Return an attribute without evaluating properties."""
    if isinstance(candidate, ModuleType):
        held = static_attribute(candidate, name)
        return attribute_of_a_part(candidate, name) if held is None else held
    if not isinstance(candidate, (nn.Module, type)):
        return None
    for table in (candidate._modules, vars(candidate)) if isinstance(candidate, nn.Module) else ():
        if name in table:
            return table[name]
    function = inspect.getattr_static(candidate if isinstance(candidate, type) else type(candidate), name, None)
    if isinstance(function, staticmethod):
        return function.__func__
    if isinstance(function, classmethod):
        return MethodType(function.__func__, candidate if isinstance(candidate, type) else type(candidate))
    if isinstance(candidate, type):
        return function if isinstance(function, FunctionType) else None
    return MethodType(function, candidate) if isinstance(function, FunctionType) else None


def items(candidate: Any) -> Iterator[Any]:
    """Yield the modules and functions in a container."""
    if isinstance(candidate, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        yield from candidate._modules.values()
    elif isinstance(candidate, (list, tuple, dict)):
        held = candidate.values() if isinstance(candidate, dict) else candidate
        yield from (item for item in held if isinstance(item, (nn.Module, FunctionType, MethodType)))


def own_calls(module: nn.Module) -> list[FunctionType | MethodType]:
    """Return the method ``__call__`` of a module whose class defines one in the place of torch's.

    Args:
        module: the module.
    """
    return [function for function in functions_run_by(module) if function.__name__ == "__call__"]


def functions_run_by(candidate: Any) -> Iterator[FunctionType | MethodType]:
    """Yield the functions or bound methods that a call of an object runs, behind their decorators.

    Example:
        >>> class Net(nn.Module):
        ...     def __call__(self, x, flip=False):
        ...         return super().__call__(x.flip(0) if flip else x)
        ...     def forward(self, x):
        ...         return x
        >>> [method.__name__ for method in functions_run_by(Net())]
        ['__call__', 'forward']
    """
    is_module = isinstance(candidate, nn.Module)
    for called in (attribute_of(candidate, name) for name in ("__call__", "forward")) if is_module else (candidate,):
        if callable(called):
            function = unwrapped(called.__func__ if isinstance(called, MethodType) else called)
            if isinstance(function, FunctionType) and not str(function.__module__).startswith("torch."):
                yield MethodType(function, called.__self__) if isinstance(called, MethodType) else function
