"""The code of a model: classes of its modules, their methods, Python modules and files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from engine.limits import LONGEST_OPTION
from engine.program.stored import modules_of
from engine.source.decorated import unwrapped
from engine.source.static_attributes import table_of

__all__ = [
    "code_of",
    "codes_of",
    "functions_of",
    "methods_of",
    "module_namespaces",
    "source_files",
    "user_classes",
    "words_in",
]

_CALLED_FROM_ELSEWHERE = ("einops.einops",)
"""Python modules whose functions the forward of classes in other ones calls."""


def user_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules and their bases, without those of `torch.nn`.

    Example:
        >>> class Net(nn.Sequential):
        ...     pass
        >>> user_classes(Net(nn.ReLU())) == [Net]
        True
    """
    return [cls for cls in _classes(model) if cls is not object and not cls.__module__.startswith("torch.nn")]


def module_namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of the Python modules that define the classes of a model, and those of einops."""
    names = {cls.__module__ for cls in user_classes(model)} | set(_CALLED_FROM_ELSEWHERE)
    return [vars(sys.modules[name]) for name in names & sys.modules.keys()]


def source_files(model: nn.Module) -> set[str]:
    """Return the files that define the classes of a model's modules and their bases."""
    modules = (sys.modules.get(name) for name in {cls.__module__ for cls in _classes(model)})
    return {file for module in modules if (file := table_of(module).get("__file__")) is not None}


def _classes(model: nn.Module) -> set[type]:
    return {cls for kind in {type(module) for _, module in modules_of(model)} for cls in kind.__mro__}


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function behind its decorators; None for a callable without Python code."""
    return getattr(unwrapped(function), "__code__", None)


@functools.cache
def functions_of(kind: Any) -> tuple[FunctionType, ...]:
    """Return the methods of a class that is not torch's, without their decorators.

    Args:
        kind: a class of modules.
    """
    bases = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    functions = (unwrapped(value) for base in bases for value in vars(base).values() if callable(value))
    return tuple(function for function in functions if isinstance(function, FunctionType))


@functools.cache
def codes_of(kind: Any) -> frozenset[CodeType]:
    """Return the code of the methods of a class that is not torch's.

    Args:
        kind: a class of modules.
    """
    return frozenset(function.__code__ for function in functions_of(kind))


@functools.cache
def methods_of(kind: Any) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the methods of a class, other than forward and those of torch, with the attributes that they name.

    Args:
        kind: a class of modules.

    Example:
        >>> class Net(nn.Module):
        ...     def encode(self, x):
        ...         return self.encoder(x)
        >>> methods_of(Net)
        (('encode', frozenset({'encoder'})),)
    """
    attributes: dict[str, frozenset[str]] = {}
    for base in reversed(kind.__mro__):
        for name, function in vars(base).items():
            code = code_of(function) if callable(function) else None
            if base.__module__.startswith("torch.") or name == "forward":
                attributes.pop(name, None)
            elif code is not None and code.co_argcount and not hasattr(nn.Module, name):
                attributes[name] = frozenset(code.co_names)
    return tuple(attributes.items())


def words_in(code: CodeType) -> Iterator[str]:
    """Yield the short strings without spaces in a function, which may be values of an option.

    Example:
        >>> list(words_in((lambda mode: mode == "mean").__code__))
        ['mean']
    """
    waiting = list(code.co_consts)
    for constant in waiting:
        if isinstance(constant, str):
            yield from [constant] if len(constant) <= LONGEST_OPTION and not any(map(str.isspace, constant)) else []
        elif isinstance(constant, (tuple, frozenset)):
            waiting += constant
        elif isinstance(constant, CodeType):
            waiting += constant.co_consts
