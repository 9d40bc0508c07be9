"""What of a statement or an expression runs whenever it does, and what only if something decides so."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["NESTED", "alternatives", "certainly", "leaves", "runs_with"]

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_GOING_ON = (ast.Return, ast.Break, ast.Continue)
_LEAVING = (*_GOING_ON, ast.Raise)

Choice = tuple[ast.AST | None, "list[ast.stmt] | ast.AST"]


def _of_test(node: Any) -> Iterable[Choice]:
    return (node.test, node.body), (node.test, node.orelse)


def _of_loop(node: Any) -> Iterable[Choice]:
    return (node.iter, node.body), (node.iter, node.orelse)


def _of_try(node: Any) -> Iterable[Choice]:
    return *((None, handler.body) for handler in node.handlers), (None, node.orelse)


_CHOICES: dict[type, Callable[[Any], Iterable[Choice]]] = {
    ast.If: _of_test,
    ast.IfExp: _of_test,
    ast.While: _of_test,
    ast.For: _of_loop,
    ast.AsyncFor: _of_loop,
    ast.BoolOp: lambda node: zip(node.values, node.values[1:], strict=False),
    ast.Try: _of_try,
    getattr(ast, "TryStar", ast.Try): _of_try,
    ast.Match: lambda node: ((node.subject, case.body) for case in node.cases),
}


def alternatives(node: ast.AST) -> Iterator[Choice]:
    """Yield what need not run of a statement or expression, with what decides.

    Example:
        >>> [ast.unparse(block) for _, block in alternatives(ast.parse("a and b or c", mode="eval").body)]
        ['c']
    """
    choices = _CHOICES.get(type(node))
    yield from () if choices is None else ((test, block) for test, block in choices(node) if block)


def runs_with(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement or expression that run with it; of a ``try``, up to where it fails.

    Example:
        >>> [ast.unparse(part) for part in runs_with(ast.parse("x if y else z", mode="eval").body)]
        ['y']
    """
    if isinstance(node, (*NESTED, *_COMPREHENSIONS)):
        return
    passed = {id(b) for _, block in alternatives(node) for b in (block if isinstance(block, list) else [block])}
    for child in ast.iter_child_nodes(node):
        if id(child) not in passed and not isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield child


def certainly(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the syntax that runs whenever statements or expressions do, or else they raise an error.

    A statement that may leave them, other than by an error, ends it: what follows need not run.

    Example:
        >>> code = ast.parse("a = b(c)\\nif d:\\n    e()\\n    f = 1\\ng()")
        >>> sorted(node.id for node in certainly(code.body) if isinstance(node, ast.Name))
        ['a', 'b', 'c', 'd', 'g']
    """
    for node in nodes:
        yield node
        if not isinstance(node, (ast.Try, ast.Assert)):
            yield from certainly(runs_with(node))
        if isinstance(node, ast.stmt) and (isinstance(node, ast.Raise) or leaves(node, _GOING_ON)):
            return


def leaves(node: ast.AST, ways: tuple[type, ...] = _LEAVING) -> bool:
    """Whether a statement may end the block that it stands in."""
    return any(isinstance(inner, ways) for inner in _own(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, NESTED):
        for child in ast.iter_child_nodes(node):
            yield from _own(child)
