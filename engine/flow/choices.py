"""What code chooses differently for other inputs, and where it does."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from engine.flow.names_used import names_in
from engine.numbers.sized_places import has_place
from engine.source.decorated import unwrapped
from engine.source.function_text import syntax_of
from engine.source.model_code import functions_of

__all__ = ["Choices", "functions_in_class", "is_plain_class"]


@dataclass(frozen=True)
class Choices:
    """What code chooses differently for other inputs.

    Attributes:
        functions: functions that contain such choices, and their callers.
        sized: places, as files and lines, where code decides by sizes that differ between inputs.
        expressions: parts of conditional expressions that did not run, and may run for other inputs.
        variables: by code of the function, the variables to which code that did not run assigns a number, or `RESULT`.
    """

    functions: Sequence[FunctionType | MethodType] = ()
    sized: Collection[str] = ()
    expressions: frozenset[ast.AST] = frozenset()
    variables: Mapping[CodeType, Collection[str]] = field(default_factory=dict)

    @functools.cached_property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions."""
        return frozenset(function.__code__ for function in self.functions)

    def are_in_class(self, kind: type) -> bool:
        """Whether a method of a class contains such a choice, or mentions a function or a class that does.

        Functions are matched by name: one too many does no harm.

        Args:
            kind: the class.

        Example:
            >>> class Plan:
            ...     def __init__(self, size):
            ...         self.parts = 2 if size > 8 else 1
            >>> line = Plan.__init__.__code__.co_firstlineno + 1
            >>> Choices(sized={f"{Plan.__init__.__code__.co_filename}:{line}"}).are_in_class(Plan)
            True
            >>> Choices().are_in_class(Plan)
            False
        """
        if kind not in self._by_class:
            self._by_class[kind] = self._are_in_any(kind)
        return self._by_class[kind]

    @functools.cached_property
    def _by_class(self) -> dict[type, bool]:
        return {}

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(function.__name__ for function in self.functions) - {"forward"}

    def _are_in_any(self, kind: type) -> bool:
        """Whether such a choice is in a class, or in one of the classes and functions that its methods mention."""
        waiting, seen = list(functions_in_class(kind)), set[CodeType]()
        while waiting:
            function = waiting.pop()
            code = function.__code__
            if code in seen:
                continue
            seen.add(code)
            if self._are_in_function(code):
                return True
            for mentioned in map(function.__globals__.get, names_in(code)):
                if isinstance(mentioned, type):
                    waiting += functions_in_class(mentioned)
                elif isinstance(mentioned, FunctionType):
                    waiting.append(mentioned)
        return False

    def _are_in_function(self, code: CodeType) -> bool:
        if code in self.codes or code in self.variables or has_place(code, self.sized):
            return True
        if not self._names.isdisjoint(names_in(code)):
            return True
        tree = syntax_of(code) if self.expressions else None
        return tree is not None and not self.expressions.isdisjoint(ast.walk(tree))


def is_plain_class(candidate: Any) -> bool:
    """Whether an object is a class, but not of modules or tensors.

    Example:
        >>> is_plain_class(dict), is_plain_class(nn.Linear)
        (True, False)
    """
    return isinstance(candidate, type) and not issubclass(candidate, (nn.Module, Tensor))


def functions_in_class(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a class, also those of its properties and class methods.

    Args:
        kind: the class, no module.

    Example:
        >>> class Plan:
        ...     parts = property(lambda self: 2)
        >>> len(list(functions_in_class(Plan)))
        1
    """
    yield from functions_of(kind)
    for base in kind.__mro__:
        for member in vars(base).values():
            inner = (getattr(member, name, None) for name in ("fget", "func", "__func__"))
            yield from (function for function in map(unwrapped, inner) if isinstance(function, FunctionType))
