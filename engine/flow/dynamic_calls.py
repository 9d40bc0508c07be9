"""Calls of functions that code looks up by name or receives as an argument, so that the caller chooses them."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import Any

from engine.flow.conditions import Conditions
from engine.flow.names_used import names_in
from engine.source.bindings import bindings, path_of
from engine.source.function_text import syntax_of
from engine.source.static_attributes import table_of
from engine.source.syntax import span_of

__all__ = ["DynamicCalls", "module_globals"]

_GETTERS = frozenset({"attrgetter", "methodcaller"})
_BY_NAME = frozenset({*_GETTERS, "getattr", "vars", "globals"})


class DynamicCalls:
    """The calls in one function whose callee the caller of the model may choose.

    Args:
        code: of the function.
        options: its arguments that may be functions chosen by the caller.
        never_changed: whether no code sets the attribute at a path of its module.
        owner: name of the argument that is the module itself; None in a plain function.
        is_module: whether the attribute at a path is a module of the network; other analyses cover these.

    Example:
        >>> list(DynamicCalls(_is_only_lookup.__code__, (), lambda path: True))
        []
    """

    def __init__(
        self,
        code: CodeType,
        options: Collection[str],
        never_changed: Callable[[str], bool],
        owner: str | None = None,
        is_module: Callable[[str], bool] = lambda path: False,
    ) -> None:
        names = names_in(code)
        tree = syntax_of(code) if options or not _BY_NAME.isdisjoint(names) or "__dict__" in names else None
        self._owner, self._is_module, self._calls = owner, is_module, list[ast.Call]()
        if tree is not None:
            arguments = {a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)} - {owner}
            self._bindings = bindings(tree, owner)
            self._conditions = Conditions(
                tree, module_globals(code.co_filename), arguments, never_changed, lambda node: True, owner
            )
            calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and not _is_only_lookup(n))
            self._calls = [call for call in calls if self._is_open(call, options)]

    def at(self, span: tuple[Any, Any], line: int) -> ast.Call | None:
        """Return the dynamic call at a position; if its column is unknown, the one on its line."""
        for call in self._calls:
            if span == span_of(call) if None not in span else call.lineno == line:
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
        return any(map(self._is_chosen_by_name, (function, *call.args, *(k.value for k in call.keywords))))

    def _is_chosen_by_name(self, function: ast.expr, depth: int = 3) -> bool:
        if isinstance(function, ast.Name):
            return depth > 0 and any(
                self._is_chosen_by_name(b.value, depth - 1) for b in self._bindings.get(function.id, ())
            )
        if isinstance(function, (ast.IfExp, ast.BoolOp)):
            parts = function.values if isinstance(function, ast.BoolOp) else [function.body, function.orelse]
            return any(self._is_chosen_by_name(part, depth) for part in parts)
        name = self._lookup_name(function)
        return name is not None and not self._conditions.is_fixed(name)

    def _lookup_name(self, node: ast.expr) -> ast.expr | None:
        """Return the name expression of a lookup whose result is not a module of the network."""
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


def _is_only_lookup(call: ast.Call) -> bool:
    return _is_lookup(call) or _is_lookup(call.func, ("attrgetter",))


def _is_lookup(node: ast.expr, names: Collection[str] = _BY_NAME) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names


@functools.cache
def module_globals(file: str) -> Mapping[str, Any]:
    """Return the globals of the Python module that was loaded from a file."""
    tables = map(table_of, list(sys.modules.values()))  # some modules import others when an attribute is asked for
    return next((table for table in tables if table.get("__file__") == file), {})
