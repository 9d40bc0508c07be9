"""Functions of a few plain statements: what they branch on, and what they return."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from engine.source.syntax import compares_with_none

__all__ = ["bound_arguments", "expressions_in", "only_branches", "only_compared_with_none", "only_result"]


def only_branches(statement: ast.stmt) -> bool:
    """Whether a statement only branches, assigns to variables, or returns."""
    if isinstance(statement, ast.If):
        return all(map(only_branches, (*statement.body, *statement.orelse)))
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(isinstance(target, ast.Name) for target in targets)
    return isinstance(statement, (ast.Return, ast.Pass)) or _is_docstring(statement)


def expressions_in(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    """Yield the conditions, assigned values and results in statements that only branch."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield statement.test
            yield from expressions_in((*statement.body, *statement.orelse))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)) and statement.value is not None:
            yield statement.value


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def only_result(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    """Return the expression that a function returns if it does nothing else, else None."""
    body = [statement for statement in tree.body if not _is_docstring(statement)]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


def bound_arguments(tree: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the arguments that a call passes, by name; None if it unpacks a sequence or a mapping."""
    names = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)]
    plain = not any(isinstance(a, ast.Starred) for a in call.args) and all(k.arg is not None for k in call.keywords)
    if not plain or len(call.args) > len(names) or tree.args.vararg or tree.args.kwarg:
        return None
    bound = dict(zip(names, call.args, strict=False))
    return bound | {k.arg: k.value for k in call.keywords if k.arg is not None}


def only_compared_with_none(result: ast.expr) -> set[str]:
    """Return the variables that an expression compares with None, and does nothing else with."""
    compared = {
        n.left
        for n in ast.walk(result)
        if isinstance(n, ast.Compare) and compares_with_none(n) and isinstance(n.left, ast.Name)
    }
    names = [n for n in ast.walk(result) if isinstance(n, ast.Name)]
    return {n.id for n in names if n in compared} - {n.id for n in names if n not in compared}
