"""Calls of functions that code picks by a name, or is passed: which function it is follows what the caller says."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import Any

from engine.source.bindings import bindings, path_of
from engine.source.branches import syntax_of
from engine.source.deciding import Decider

__all__ = ["Picks", "space_of"]

_GETTERS = frozenset({"attrgetter", "methodcaller"})
_BY_NAME = frozenset({*_GETTERS, "getattr", "vars", "globals"})


class Picks:
    """The calls in one function whose function is not settled by the code.

    Args:
        code: of the function.
        options: its arguments that may be functions of the caller's.
        settled: tells of a path of attributes of its module that nobody sets the last one of them.
        owner: the argument that is the module itself; None in a function that is no method.
        is_module: tells of a path of attributes of that whether a module is there, which is recorded otherwise.

    Example:
        >>> list(Picks(_inner.__code__, (), lambda path: True))
        []
    """

    def __init__(
        self,
        code: CodeType,
        options: Collection[str],
        settled: Callable[[str], bool],
        owner: str | None = None,
        is_module: Callable[[str], bool] = lambda path: False,
    ) -> None:
        names = set(code.co_names) | {name for inner in _inner(code) for name in inner.co_names}
        tree = syntax_of(code) if options or not _BY_NAME.isdisjoint(names) or "__dict__" in names else None
        self._owner, self._is_module, self._calls = owner, is_module, list[ast.Call]()
        if tree is not None:
            own = {a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)} - {owner}
            self._bindings = bindings(tree, owner)
            self._decider = Decider(tree, space_of(code.co_filename), own, settled, lambda node: True, owner)
            calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and not _only_looks_up(n))
            self._calls = [call for call in calls if self._is_open(call, options)]

    def at(self, end: tuple[int, int] | None, line: int) -> ast.Call | None:
        """Return the call of that kind that ends at a place, or stands on a line where its end is not known."""
        for call in self._calls:
            if end == (call.end_lineno, call.end_col_offset) if end is not None else call.lineno == line:
                return call
        return None

    def __iter__(self) -> Iterator[ast.Call]:
        return iter(self._calls)

    def _is_open(self, call: ast.Call, options: Collection[str]) -> bool:
        function: ast.expr = call.func
        while isinstance(function, ast.Call) and not _is_lookup(function):
            function = function.func  # getattr(nn, name)()(h)
        if isinstance(function, ast.Name) and function.id in options:
            return True
        return any(map(self._is_picked, (function, *call.args, *(k.value for k in call.keywords))))

    def _is_picked(self, function: ast.expr, depth: int = 3) -> bool:
        if isinstance(function, ast.Name):
            return depth > 0 and any(self._is_picked(b.value, depth - 1) for b in self._bindings.get(function.id, ()))
        if isinstance(function, (ast.IfExp, ast.BoolOp)):
            parts = function.values if isinstance(function, ast.BoolOp) else [function.body, function.orelse]
            return any(self._is_picked(part, depth) for part in parts)
        name = self._name_in(function)
        return name is not None and not self._decider.fixed(name)

    def _name_in(self, node: ast.expr) -> ast.expr | None:
        """Return the name by which an expression looks something up, in anything but modules of the network."""
        if isinstance(node, ast.Subscript):
            table = node.value
            return node.slice if getattr(table, "attr", "") == "__dict__" or _is_lookup(table) else None
        if not isinstance(node, ast.Call):
            return None
        lookup = node.func if _is_lookup(node.func, _GETTERS) else node  # attrgetter(name)(F)
        if not isinstance(lookup, ast.Call) or not _is_lookup(lookup) or not lookup.args:
            return None
        first, _, path = (path_of(lookup.args[0]) or "").partition(".")
        if first == self._owner and (not path or self._is_module(path)):
            return None
        return lookup.args[min(1, len(lookup.args) - 1)]


def _inner(code: CodeType) -> Iterator[CodeType]:
    yield from (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _only_looks_up(call: ast.Call) -> bool:
    return _is_lookup(call) or _is_lookup(call.func, ("attrgetter",))


def _is_lookup(node: ast.expr, names: Collection[str] = _BY_NAME) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names


@functools.cache
def space_of(file: str) -> Mapping[str, Any]:
    """Return the globals of the Python module that is loaded from a file."""
    loaded = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file]
    return vars(loaded[0]) if loaded else {}
