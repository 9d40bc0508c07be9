"""Assignments of a variable that may be the last one before an expression is evaluated."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from engine.source.bindings import bindings

__all__ = ["Definition", "definitions_before", "is_never_none"]

_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match, ast.FunctionDef)
_COMPUTED = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.Tuple, ast.List, ast.Dict, ast.Set)
_CONTAINERS = (list, set, dict, deque)
"""Types with methods that may return None, but are named like methods of tensors."""


class Definition(NamedTuple):
    """An assignment that may have given a variable its value.

    Attributes:
        value: the assigned expression; None if the variable receives only an item of one (in a loop).
        node: the statement.
    """

    value: ast.expr | None
    node: ast.AST


def definitions_before(
    tree: ast.FunctionDef | ast.AsyncFunctionDef, name: str, at: ast.AST
) -> frozenset[Definition] | None:
    """Return the assignments, one of which is the last before an expression is evaluated.

    Args:
        tree: syntax of a function.
        name: of a variable.
        at: an expression in the function.

    Returns:
        The assignments; None if the variable may still have its value from the call of the function.

    Example:
        >>> code = "def f(x, on):\\n  v = g(x)\\n  if on:\\n    v = x + 1\\n  else: v = None\\n  return v"
        >>> tree = ast.parse(code).body[0]
        >>> last = tree.body[-1].value
        >>> sorted(ast.unparse(definition.value) for definition in definitions_before(tree, "v", last))
        ['None', 'x + 1']
        >>> definitions_before(tree, "x", last) is None
        True
    """
    reaching = _Reaching(tree, name)
    result = reaching.at(tree.body, reaching.start, at)
    return None if result is None or reaching.start & result else result


class _Reaching:
    def __init__(self, tree: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        self.start = frozenset({Definition(None, tree)})
        self._name = name
        self._by_node = {binding.node: binding for binding in bindings(tree).get(name, ())}

    def at(self, block: Sequence[ast.stmt], before: frozenset[Definition], at: ast.AST) -> frozenset[Definition] | None:
        """Return the definitions that reach an expression in a block; None if the block does not contain it."""
        for statement in block:
            if any(node is at for node in ast.walk(statement)):
                return self._inside(statement, before, at)
            before = self._after(statement, before)
        return None

    def _inside(self, statement: ast.stmt, before: frozenset[Definition], at: ast.AST) -> frozenset[Definition] | None:
        if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):  # a round may begin after any other round
            inside = before | self._all_in(statement)
            within = self.at(statement.body, inside, at)
            return inside if within is None else within
        if not isinstance(statement, ast.If):
            return (
                before | self._all_in(statement) if isinstance(statement, _COMPOUND) else self._own(statement, before)
            )
        if any(node is at for node in ast.walk(statement.test)):
            return before | self._all_in(statement.test)
        before |= self._all_in(statement.test)
        body = self.at(statement.body, before, at)
        return self.at(statement.orelse, before, at) if body is None else body

    def _own(self, statement: ast.stmt, before: frozenset[Definition]) -> frozenset[Definition]:
        """Return the definitions that reach a simple statement: its own assignment comes after its value."""
        return before | (self._all_in(statement) - self._definitions([statement]))

    def _after(self, statement: ast.stmt, before: frozenset[Definition]) -> frozenset[Definition]:
        if isinstance(statement, ast.If):
            before |= self._all_in(statement.test)
            branches = [before, before]
            for place, block in enumerate((statement.body, statement.orelse)):
                for inner in block:
                    branches[place] = self._after(inner, branches[place])
            return branches[0] | branches[1]
        binding = self._by_node.get(statement)
        replaces = binding is not None and binding.replaces and not isinstance(statement, _COMPOUND)
        return self._all_in(statement) if replaces else before | self._all_in(statement)

    def _all_in(self, node: ast.AST) -> frozenset[Definition]:
        return self._definitions(ast.walk(node))

    def _definitions(self, nodes: Sequence[ast.AST] | Iterator[ast.AST]) -> frozenset[Definition]:
        return frozenset(
            Definition(self._by_node[node].value if self._is_whole(node) else None, node)
            for node in nodes
            if node in self._by_node
        )

    def _is_whole(self, node: ast.AST) -> bool:
        """Whether a statement assigns the whole value of an expression."""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        plain = isinstance(node, (ast.Assign, ast.AnnAssign))
        return plain and any(isinstance(target, ast.Name) and target.id == self._name for target in targets)


def is_never_none(value: ast.expr, local: Collection[str]) -> bool:
    """Whether an expression that once gave a tensor is never None: an operator, or a method of tensors.

    Args:
        value: the expression.
        local: variables of the function other than the module, whose methods may be those of tensors.

    Example:
        >>> codes = ("x + 1", "x.view(2, 3)", "f(x)", "x", "None", "self.view(2, 3)")
        >>> [is_never_none(ast.parse(code, mode="eval").body, {"x"}) for code in codes]
        [True, True, False, False, False, False]
    """
    if isinstance(value, ast.Constant):
        return value.value is not None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        method, owner = value.func.attr, value.func.value
        plain = isinstance(owner, ast.Name) and owner.id in local and not method.startswith("_")
        return plain and hasattr(torch.Tensor, method) and not any(hasattr(kind, method) for kind in _CONTAINERS)
    return isinstance(value, _COMPUTED)
