"""Which parts of a statement or an expression always run with it, and which only under a condition."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "NESTED",
    "always_run",
    "conditional_parts",
    "controls",
    "may_leave",
    "only_reports",
    "swallows_errors",
    "unconditional_parts",
]

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_JUMPS = (ast.Return, ast.Break, ast.Continue)
_EXITS = (*_JUMPS, ast.Raise)
_CASES = (ast.ExceptHandler, ast.match_case)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)

_MANAGERS = frozenset("autocast enable_grad inference_mode no_grad set_grad_enabled record_function".split())

Choice = tuple[ast.AST | None, "list[ast.stmt] | ast.AST"]


def _choices_of_test(node: Any) -> Iterable[Choice]:
    return (node.test, node.body), (node.test, node.orelse)


def _choices_of_loop(node: Any) -> Iterable[Choice]:
    condition = node.test if isinstance(node, ast.While) else node.iter
    return (condition, node.body), (node if _is_left(node) else condition, node.orelse)


def _is_left(loop: ast.AST) -> bool:
    """Whether a loop may end by ``break``, so that what stands behind its ``else`` does not run."""
    return any(isinstance(node, ast.Break) for node in _own_nodes(loop))


def _choices_of_try(node: Any) -> Iterable[Choice]:
    return *((None, handler.body) for handler in node.handlers), (None, node.orelse)


_NO_COMPUTATION = (ast.Raise, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
_REPORTS = frozenset("debug info warning warning_once warn error exception critical print log".split())

_CHOICES: dict[type, Callable[[Any], Iterable[Choice]]] = {
    ast.If: _choices_of_test,
    ast.IfExp: _choices_of_test,
    ast.While: _choices_of_loop,
    ast.For: _choices_of_loop,
    ast.AsyncFor: _choices_of_loop,
    ast.BoolOp: lambda node: zip(node.values, node.values[1:], strict=False),
    ast.Try: _choices_of_try,
    getattr(ast, "TryStar", ast.Try): _choices_of_try,
    ast.Match: lambda node: ((node.subject, case.body) for case in node.cases),
}


def tests_in(decision: ast.AST | None) -> list[ast.expr]:
    """Return the conditions that decide whether code runs: an expression, or those in a statement that may leave.

    Example:
        >>> [ast.unparse(test) for test in tests_in(ast.parse("if a:\\n    if b: return").body[0])]
        ['a', 'b']
    """
    if isinstance(decision, ast.expr):
        return [decision]
    return [] if decision is None else [n.test for n in ast.walk(decision) if isinstance(n, (ast.If, ast.IfExp))]


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


@functools.cache
def controls(tree: ast.AST) -> Mapping[ast.AST, Sequence[ast.expr | None]]:
    """Return the conditions under which the parts of a function run, by syntax node; None stands for an error.

    Example:
        >>> [loop] = ast.parse("for n in x:\\n    if n: break\\n    a = n if b else c").body
        >>> conditions = controls(loop)[loop.body[1].value.body]
        >>> [ast.unparse(condition) for condition in conditions]
        ['x', 'n', 'b']
    """
    table: dict[ast.AST, Sequence[ast.expr | None]] = {}
    waiting: list[tuple[ast.AST, tuple[ast.expr | None, ...]]] = [(tree, ())]
    while waiting:
        node, conditions = waiting.pop()
        table[node] = conditions
        own = {child: test for test, part in conditional_parts(node) for child in _listed(part)}
        own |= {
            child: getattr(node, "subject", None) for child in ast.iter_child_nodes(node) if isinstance(child, _CASES)
        }
        inside: tuple[ast.expr | None, ...] = tuple(_tests_of_jumps(node)) if isinstance(node, _LOOPS) else ()
        protected = {id(statement) for statement in swallows_errors(node)}
        for child in ast.iter_child_nodes(node):
            further: tuple[Any, ...] = (
                (*inside, own[child]) if child in own else (None,) if id(child) in protected else ()
            )
            waiting.append((child, (*conditions, *further[::-1])))
    return table


def _listed(part: list[ast.stmt] | ast.AST) -> Sequence[ast.AST]:
    return part if isinstance(part, list) else [part]


def _tests_of_jumps(loop: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions under which a loop ends early, or goes on with the next item."""
    for node in _own_nodes(loop):
        if isinstance(node, ast.If) and may_leave(node, (ast.Break, ast.Continue)):
            yield node.test


def swallows_errors(node: ast.AST) -> Sequence[ast.stmt]:
    """Return the statements of which an error need not end the function: in a ``try``, or in a ``with``.

    Context managers of torch raise all errors again.

    Example:
        >>> code = ast.parse("with suppress(KeyError):\\n    a()\\nwith torch.no_grad():\\n    b()")
        >>> [ast.unparse(swallows_errors(statement)) for statement in code.body]
        ['a()', '']
    """
    handlers: Sequence[ast.AST] = getattr(node, "handlers", ())
    if handlers:
        return node.body  # type: ignore[attr-defined, no-any-return]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        managers = [item.context_expr for item in node.items]
        return [] if all(map(_is_of_torch, managers)) else node.body
    return []


def _is_of_torch(manager: ast.expr) -> bool:
    while isinstance(manager, (ast.Call, ast.Attribute)):
        name, manager = getattr(manager, "attr", ""), manager.func if isinstance(manager, ast.Call) else manager.value
        if name in _MANAGERS:
            return True
    return isinstance(manager, ast.Name) and (manager.id == "torch" or manager.id in _MANAGERS)


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


def only_reports(statement: ast.AST) -> bool:
    """Whether a statement only raises, checks, imports, declares, warns or logs.

    Example:
        >>> [only_reports(s) for s in ast.parse("import os; logger.info(x); raise E; y = f(x); f(x)").body]
        [True, True, True, False, False]
    """
    function = getattr(getattr(statement, "value", None), "func", None)
    name = getattr(function, "attr", getattr(function, "id", ""))
    return isinstance(statement, _NO_COMPUTATION) or isinstance(statement, ast.Expr) and name in _REPORTS
