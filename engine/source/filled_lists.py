"""Containers that a function creates and reads, and that nothing else can change."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

from engine.source.bindings import FILLS, targets_of
from engine.source.syntax import nodes_of, parents_of

__all__ = ["fillers", "is_only_filled", "may_change_elsewhere"]

_READING_BUILTINS = frozenset("any all bool enumerate len list max min reversed sorted str sum tuple zip".split())
_READING_METHODS = frozenset("copy count get index items keys values".split())


def fillers(tree: ast.AST, name: str) -> frozenset[int]:
    """Return the negative numbers with which a list is filled before its items are set: they are no sizes.

    Args:
        tree: of the function.
        name: of the variable.

    Example:
        >>> tree = ast.parse("repeats = [-1] * n\\nrepeats[0] = size\\nother = [-2] * n")
        >>> list(fillers(tree, "repeats"))
        [-1]
    """
    numbers = set[int]()
    for statement in nodes_of(tree, ast.Assign):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=target)], value=ast.BinOp(left=ast.List(elts=items), op=ast.Mult())
            ) if target == name:
                literals = (n.operand for n in items if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub))
                numbers |= {-n.value for n in literals if isinstance(n, ast.Constant) and type(n.value) is int}
    return frozenset(numbers)


def is_only_filled(tree: ast.AST, name: str, is_torch: Callable[[ast.expr], bool]) -> bool:
    """Whether a function creates a list empty, appends to it in statements, and otherwise only reads it.

    A list that is assigned to another variable, passed to a function that may change it, extended, or named in an inner
    function may have another length.

    Args:
        tree: of the function.
        name: of the variable.
        is_torch: whether an expression is a function of torch, which changes no list.

    Example:
        >>> texts = ("x = []\\nx.append(y)\\nlen(x)", "x = []\\nx += y", "x = []\\nz = x", "x = y")
        >>> [is_only_filled(ast.parse(text), "x", lambda function: False) for text in texts]
        [True, False, False, False]
    """
    parents = parents_of(tree)
    mentions = [node for node in nodes_of(tree, ast.Name) if node.id == name]
    new = set(_created_empty(tree))
    created = [node for node in mentions if node in new]
    rest = [node for node in mentions if node not in created]
    return (
        not _is_bound_elsewhere(tree, name)
        and bool(created)
        and all(_is_read(node, parents, is_torch) or _is_appended_to(node, parents) for node in rest)
    )


def may_change_elsewhere(tree: ast.AST, name: str, is_torch: Callable[[ast.expr], bool]) -> bool:
    """Whether anything other than the bindings of a variable may change the container that it holds.

    Args:
        tree: of the function.
        name: of the variable.
        is_torch: whether an expression is a function of torch, which changes no container.

    Example:
        >>> texts = ("x = [1]\\nx.append(y)", "x = [1]\\nz = x", "x = [1]\\nx.pop()")
        >>> [may_change_elsewhere(ast.parse(text), "x", lambda function: False) for text in texts]
        [False, True, True]
    """
    parents = parents_of(tree)
    mentions = (node for node in nodes_of(tree, ast.Name) if node.id == name and not isinstance(node.ctx, ast.Store))
    return _is_bound_elsewhere(tree, name) or not all(
        _is_read(node, parents, is_torch) or _is_of_safe_method(node, parents) or _is_item_set(parents[node])
        for node in mentions
    )


def _is_of_safe_method(node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    method = parents[node]
    is_safe = isinstance(method, ast.Attribute) and method.attr in _READING_METHODS | FILLS
    return is_safe and getattr(parents[method], "func", None) is method


def _is_item_set(parent: ast.AST) -> bool:
    return isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)


def _is_bound_elsewhere(tree: ast.AST, name: str) -> bool:
    """Whether an inner function uses a variable, or anything other than an assignment binds it."""
    functions = (f for f in nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda) if f is not tree)
    inner = {n.id for function in functions for n in nodes_of(function, ast.Name)}
    bound = (getattr(node, kind, None) for node in nodes_of(tree) for kind in ("name", "rest", "asname"))
    return name in {*inner, *bound}


def _created_empty(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets that are assigned an empty list which no other target shares."""
    for statement in nodes_of(tree, ast.Assign, ast.AnnAssign):
        if len(getattr(statement, "targets", [None])) == 1:
            pairs = targets_of(statement)
            yield from (target for target, value, _ in pairs if isinstance(value, ast.List) and not value.elts)


def _is_appended_to(node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    method = parents[node]
    call = parents[method]
    statement = parents.get(call)
    appends = isinstance(method, ast.Attribute) and method.attr == "append"
    return appends and isinstance(call, ast.Call) and call.func is method and isinstance(statement, ast.Expr)


def _is_read(node: ast.expr, parents: Mapping[ast.AST, ast.AST], is_torch: Callable[[ast.expr], bool]) -> bool:
    """Whether an expression is only read where it stands."""
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return False
    match parents[node]:
        case ast.If() | ast.While() | ast.Compare() | ast.Return() | ast.Starred() | ast.BinOp() | ast.UnaryOp():
            return True
        case ast.IfExp(test=test):
            return test is node or _is_returned(node, parents)
        case ast.Tuple() | ast.List() | ast.Dict():
            return _is_returned(node, parents)
        case ast.For(iter=read) | ast.comprehension(iter=read):
            return read is node
        case ast.Subscript(value=value, ctx=ast.Load()):
            return value is node
        case ast.BoolOp() as whole:
            return _is_read(whole, parents, is_torch)
        case ast.Call(func=ast.Name(id=function), args=args) if function in _READING_BUILTINS:
            return node in args
        case ast.Call(func=function, args=args):
            return node in args and is_torch(function)
    return False


def _is_returned(node: ast.expr, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether an expression is returned, or is a part of what is returned."""
    whole: ast.AST = node
    while isinstance(whole, (ast.Tuple, ast.List, ast.Dict, ast.IfExp)) or whole is node:
        whole = parents[whole]
    return isinstance(whole, ast.Return)
