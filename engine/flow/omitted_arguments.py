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
from engine.source.syntax import nodes_of, span_of

__all__ = ["empty_arguments", "ends_of_numeric_fallbacks", "fallback_variables", "holds_either", "is_filled"]

_CHOICES = (ast.IfExp, ast.BoolOp)
_OPERATIONS = (ast.BinOp, ast.Call, ast.AugAssign, ast.UnaryOp, ast.Compare)
_DESCRIPTIONS = frozenset(
    "device dim dtype hasattr is_floating_point isinstance len ndim numel shape size type".split()
)


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


def empty_arguments(function: FunctionBranches, variables: Mapping[str, Any]) -> set[str]:
    """Return the arguments that are None, or hold nothing: code may put a number in the place of their items.

    Args:
        function, variables: as for `fallback_variables`.
    """
    held = ((name, variables.get(name, function)) for name in arguments_of(function.code))
    return {name for name, value in held if value is None or type(value) in (tuple, list) and not value}


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
def ends_of_numeric_fallbacks(
    tree: ast.AST,
    omitted: frozenset[str],
    computed: frozenset[Any],
) -> Mapping[tuple[int, int], bool]:
    """Return the end positions of the calls and operators that receive a number in place of an argument.

    What code computes of such a number, without an op, is a number in place of the argument as well.

    Args:
        tree: syntax of a function.
        omitted: arguments that may be None, or empty.
        computed: spans of the calls and operators for which an op was recorded.

    Returns:
        For each, whether the number is one for certain: what a function returns for such arguments alone may be none.

    Example:
        >>> code = "def f(x, b=None, c=None):\\n  c = c or 1\\n"
        >>> code += "  return x + (0 if b is None else b) + x * (1 + c) + g(b)"
        >>> tree, ops = ast.parse(code), frozenset({((3, 9), (3, 36)), ((3, 39), (3, 50)), ((3, 9), (3, 50))})
        >>> ends_of_numeric_fallbacks(tree, frozenset("bc"), ops)
        {(3, 36): True, (3, 49): True, (3, 50): True, (3, 57): False}
    """
    numbers = _Numbers(tree, omitted, computed)
    while numbers.follow():
        pass
    return dict(sorted(numbers.ends.items()))


class _Numbers:
    """Expressions and variables that hold a number in place of an argument, each with whether they do for certain.

    Args:
        tree, omitted, computed: as those of `ends_of_numeric_fallbacks`.
    """

    def __init__(self, tree: ast.AST, omitted: frozenset[str], computed: frozenset[Any]) -> None:
        self._operations, self._bindings = nodes_of(tree, *_OPERATIONS), bindings(tree)
        self._omitted, self._computed, self._carrying = omitted, computed, set(omitted)
        while more := {name for name in self._bindings if self._carries(name)} - self._carrying:
            self._carrying |= more
        self._expressions = {id(n): True for n in nodes_of(tree, *_CHOICES) if _chooses_number(n, omitted)}
        self._expressions |= {id(n): False for n in nodes_of(tree, ast.Call) if self._passes_nothing_else(n)}
        self._names: dict[str, bool] = {}
        self.ends: dict[tuple[int, int], bool] = {}

    def follow(self) -> bool:
        """Follow the numbers one step further, and return whether that leads to more of them."""
        before = len(self._expressions), len(self._names), sum(self.ends.values()), len(self.ends)
        for name, values in self._bindings.items():
            held = [self._certain(b.value) for b in values if not self._is_computed(b.node)]
            held += [True] if self._may_be_number(name) else []
            if any(certain is not None for certain in held):
                self._names[name] = self._names.get(name, False) or any(held)
        for node in self._operations:
            parts = [*ast.iter_child_nodes(node), *(k.value for k in getattr(node, "keywords", ()))]
            parts += [node.func.value] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
            held = [certain for part in parts if (certain := self._certain(part)) is not None]
            if not held:
                continue
            _, end = span_of(node)
            self.ends[end] = self.ends.get(end, False) or any(held)
            if not self._is_computed(node) and (not isinstance(node, ast.Call) or self._has_numbers_alone(node)):
                self._expressions.setdefault(id(node), any(held))
        return before != (len(self._expressions), len(self._names), sum(self.ends.values()), len(self.ends))

    def _certain(self, part: ast.AST) -> bool | None:
        """Whether an expression is such a number for certain; None if it is none."""
        return self._names.get(part.id) if isinstance(part, ast.Name) else self._expressions.get(id(part))

    def _is_computed(self, node: ast.AST) -> bool:
        return isinstance(node, _OPERATIONS) and span_of(node) in self._computed

    def _may_be_number(self, name: str) -> bool:
        """Whether a variable is a number by default, and follows from the argument otherwise."""
        values = [b.value for b in self._bindings[name]]
        return any(map(_is_number, values)) and (name in self._omitted or name in self._carrying)

    def _carries(self, name: str) -> bool:
        """Whether a variable may hold such an argument, an item of it, or what is computed of it."""
        return any(self._reads(b.value) for b in self._bindings[name] if not self._is_computed(b.node))

    def _reads(self, expr: ast.AST) -> bool:
        """Whether an expression reads such an argument, other than its sizes."""
        if isinstance(expr, ast.Name):
            return expr.id in self._carrying
        if isinstance(expr, ast.Attribute) and expr.attr in _DESCRIPTIONS:
            return False
        is_length = isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id in _DESCRIPTIONS
        return not is_length and any(map(self._reads, ast.iter_child_nodes(expr)))

    def _passes_nothing_else(self, call: ast.Call) -> bool:
        """Whether a call gets such arguments, and nothing else but literals."""
        names = [part.id for part in call.args if isinstance(part, ast.Name)]
        literals = sum(isinstance(part, ast.Constant) for part in call.args)
        is_description = isinstance(call.func, ast.Name) and call.func.id in _DESCRIPTIONS
        alone = not call.keywords and len(names) + literals == len(call.args) and bool(names)
        return alone and not is_description and self._omitted.issuperset(names)

    def _has_numbers_alone(self, call: ast.Call) -> bool:
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        return all(_is_number(part) or self._certain(part) is not None for part in parts)


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
