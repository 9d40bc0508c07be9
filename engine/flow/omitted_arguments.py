"""Variables and numbers that replace arguments which a call omits."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.flow.branches import FunctionBranches
from engine.flow.effects import names_read
from engine.source.bindings import bindings
from engine.source.instructions import arguments_of

__all__ = ["ends_of_numeric_fallbacks", "fallback_variables", "holds_either", "is_filled"]

_CHOICES = (ast.IfExp, ast.BoolOp)
_OPERATIONS = (ast.BinOp, ast.Call, ast.AugAssign, ast.UnaryOp, ast.Compare)


def fallback_variables(function: FunctionBranches, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that may replace arguments which are None, each with its argument.

    Args:
        function: the function, which begins to run.
        variables: values of its variables at that time.

    Example:
        >>> from engine.source.function_text import syntax_of
        >>> function = FunctionBranches(names_read.__code__, syntax_of(names_read.__code__))
        >>> fallback_variables(function, {"node": None}).get("node")
        'node'
    """
    code = function.code
    arguments = arguments_of(code)
    omitted = [name for name in arguments if name in variables and variables[name] is None]
    result = {name: name for name in omitted}
    for target, read in _variables_read_for(function.tree) if omitted else ():
        if target not in arguments:
            result.update((target, name) for name in omitted if name in read)
    return result


@functools.cache
def _variables_read_for(tree: ast.AST) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the variables of a function, each with the variables from which it is computed."""
    values_by_name = {name: values for name, values in bindings(tree).items() if name.isidentifier()}
    return tuple(
        (name, frozenset(n for b in values for n in names_read(b.value))) for name, values in values_by_name.items()
    )


@functools.cache
def holds_either(tree: ast.AST, variable: str, argument: str) -> bool:
    """Whether a variable holds an argument itself, or its replacement, but no value computed from it.

    Args:
        tree: syntax of a function.
        variable, argument: their names.

    Example:
        >>> tree = ast.parse("def f(self, s=None):\\n  b = self.b if s is None else s\\n  if s: w = self.w * s")
        >>> holds_either(tree, "b", "s"), holds_either(tree, "w", "s")
        (True, False)
    """
    own = (b.value for b in bindings(tree).get(variable, ()))
    values = [value for value in own if argument in names_read(value)]
    return variable == argument or any(not isinstance(value, (ast.BinOp, ast.Call)) for value in values)


@functools.cache
def ends_of_numeric_fallbacks(tree: ast.AST, omitted: frozenset[str]) -> frozenset[tuple[int, int]]:
    """Return the end positions of the calls and operators that receive a number in place of an argument.

    Args:
        tree: syntax of a function.
        omitted: arguments that may be None.

    Example:
        >>> code = "def f(x, b=None, c=None):\\n  c = c or 1\\n  return x + (0 if b is None else b) + x * c"
        >>> sorted(ends_of_numeric_fallbacks(ast.parse(code), frozenset("bc")))
        [(3, 36), (3, 44)]
    """
    choices = {id(n) for n in ast.walk(tree) if isinstance(n, _CHOICES) and _chooses_number(n, omitted)}
    names = {
        name
        for name, values in bindings(tree).items()
        if any(id(b.value) in choices or (name in omitted and _is_number(b.value)) for b in values)
    }
    ends: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, _OPERATIONS):
            parts = [*ast.iter_child_nodes(node), *(k.value for k in getattr(node, "keywords", ()))]
            parts += [node.func.value] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
            if any(id(p) in choices or (isinstance(p, ast.Name) and p.id in names) for p in parts):
                ends.add((node.end_lineno or 0, node.end_col_offset or 0))
    return frozenset(ends)


def _chooses_number(choice: ast.AST, omitted: frozenset[str]) -> bool:
    """Whether an expression is a number if an argument is None."""
    parts = choice.values if isinstance(choice, ast.BoolOp) else [choice.body, choice.orelse]  # type: ignore[attr-defined]
    names = {n.id for n in ast.walk(choice) if isinstance(n, ast.Name)}
    return not omitted.isdisjoint(names) and any(map(_is_number, parts))


def _is_number(value: ast.expr) -> bool:
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float))


def is_filled(value: Any) -> bool:
    """Whether an argument is a tensor, or a container with tensors alone.

    Args:
        value: that is passed.

    Example:
        >>> h = Tensor([1])
        >>> [is_filled(value) for value in (h, [h, h], {"a": h}, [], [h, None])]
        [True, True, True, False, False]
    """
    items = list(value.values()) if isinstance(value, dict) else value
    return isinstance(value, Tensor) or type(items) in (tuple, list) and len(items) > 0 and all(map(is_filled, items))
