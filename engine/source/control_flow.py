"""Which parts of a statement or an expression always run with it, and which only under a condition."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["NESTED", "always_run", "conditional_parts", "may_leave", "unconditional_parts"]

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_JUMPS = (ast.Return, ast.Break, ast.Continue)
_EXITS = (*_JUMPS, ast.Raise)

Choice = tuple[ast.AST | None, "list[ast.stmt] | ast.AST"]


def _choices_of_test(node: Any) -> Iterable[Choice]:
    return (node.test, node.body), (node.test, node.orelse)


def _choices_of_loop(node: Any) -> Iterable[Choice]:
    return (node.iter, node.body), (node.iter, node.orelse)


def _choices_of_try(node: Any) -> Iterable[Choice]:
    return *((None, handler.body) for handler in node.handlers), (None, node.orelse)


_CHOICES: dict[type, Callable[[Any], Iterable[Choice]]] = {
    ast.If: _choices_of_test,
    ast.IfExp: _choices_of_test,
    ast.While: _choices_of_test,
    ast.For: _choices_of_loop,
    ast.AsyncFor: _choices_of_loop,
    ast.BoolOp: lambda node: zip(node.values, node.values[1:], strict=False),
    ast.Try: _choices_of_try,
    getattr(ast, "TryStar", ast.Try): _choices_of_try,
    ast.Match: lambda node: ((node.subject, case.body) for case in node.cases),
}


def conditional_parts(node: ast.AST) -> Iterator[Choice]:
    """Yield the parts of a statement or expression that need not run, each after the condition that decides.

    Example:
        >>> [ast.unparse(block) for _, block in conditional_parts(ast.parse("a and b or c", mode="eval").body)]
        ['c']
    """
    choices = _CHOICES.get(type(node))
    yield from () if choices is None else ((test, block) for test, block in choices(node) if block)


def unconditional_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement or expression that run with it; the body of a ``try`` runs up to an error.

    Example:
        >>> [ast.unparse(part) for part in unconditional_parts(ast.parse("x if y else z", mode="eval").body)]
        ['y']
    """
    if isinstance(node, (*NESTED, *_COMPREHENSIONS)):
        return
    conditional = {
        id(b) for _, block in conditional_parts(node) for b in (block if isinstance(block, list) else [block])
    }
    for child in ast.iter_child_nodes(node):
        if id(child) not in conditional and not isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield child


def always_run(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the syntax nodes that run whenever statements or expressions do, unless these raise an error.

    Code after a statement that may leave the block, other than by an error, need not run.

    Example:
        >>> code = ast.parse("a = b(c)\\nif d:\\n    e()\\n    f = 1\\ng()")
        >>> sorted(node.id for node in always_run(code.body) if isinstance(node, ast.Name))
        ['a', 'b', 'c', 'd', 'g']
    """
    for node in nodes:
        yield node
        if not isinstance(node, (ast.Try, ast.Assert)):
            yield from always_run(unconditional_parts(node))
        if isinstance(node, ast.stmt) and (isinstance(node, ast.Raise) or may_leave(node, _JUMPS)):
            return


def may_leave(node: ast.AST, exits: tuple[type, ...] = _EXITS) -> bool:
    """Whether a statement may leave the block that contains it."""
    return any(isinstance(inner, exits) for inner in _own_nodes(node))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, NESTED):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
