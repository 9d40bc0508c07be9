"""Attributes that stay None: a function assigns None to them, or something else only where they are not None.

``if self.head_dist is not None: self.head_dist = nn.Linear(…)`` leaves a model without such a head as it is.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from types import CodeType

from engine.source.function_text import syntax_of

__all__ = ["assigned_where_none"]


@functools.cache
def assigned_where_none(code: CodeType) -> frozenset[str] | None:
    """Return the attributes, of any object, to which a function may assign something else while they are None.

    Args:
        code: of the function.

    Returns:
        Their names; None where the source does not tell.
    """
    tree = syntax_of(code)
    if tree is None or "setattr" in code.co_names:
        return None
    harmless = set(_assigned_none(tree)) | set(_assigned_where_something(tree))
    written = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load))
    return frozenset(n.attr for n in written if n not in harmless)


def _assigned_none(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            if node.value.value is None:
                yield from node.targets if isinstance(node, ast.Assign) else [node.target]


def _assigned_where_something(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the attributes that are assigned where a condition says that they are not None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            attributes = set(map(ast.dump, _not_none(node.test)))
            inside = (n for statement in node.body for n in _outside_of_functions(statement))
            targets = (n for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            yield from (n for n in targets if ast.dump(ast.Attribute(n.value, n.attr, ast.Load())) in attributes)


def _not_none(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the attributes of variables that are not None where a condition is true."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _not_none(part)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot):
        none, left = test.comparators[0], test.left
        if isinstance(none, ast.Constant) and none.value is None and isinstance(left, ast.Attribute):
            yield from [left] if isinstance(left.value, ast.Name) else []


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax of a statement without functions and classes inside, which may run later."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_of_functions(child)
