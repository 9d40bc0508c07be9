"""Names under which code sets attributes by a function: ``for name in ("encoder", "body"): setattr(self, name, x)``."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator
from types import CodeType

from engine.source.bindings import bindings, path_of
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of

__all__ = ["SETTERS", "names_set_by_functions"]

SETTERS = frozenset(["setattr", "delattr", "__setattr__", "__delattr__"])
"""Functions and methods that set an attribute by its name."""

_MOST_NAMES = 64

_READERS = frozenset(["getattr", "hasattr", "len", "print", *SETTERS])

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_set_by_functions(code: CodeType, owner: str) -> frozenset[str] | None:
    """Return the names of attributes that functions such as ``setattr`` set, where the code writes these names out.

    Args:
        code: of a function.
        owner: the variable whose attributes are asked for, and those of the objects that it holds.

    Returns:
        The names of the variable's own attributes; None where some name cannot be told.

    Example:
        >>> def replace(net, part):
        ...     places = ["encoder", "body"]
        ...     for name in places:
        ...         if hasattr(net, name):
        ...             setattr(net, name, part)
        >>> sorted(names_set_by_functions(replace.__code__, "net"))
        ['body', 'encoder']
    """
    tree = syntax_of(code)
    if tree is None:
        return None
    own = set[str]()
    for call in nodes_of(tree, ast.Call):
        path, name = _target(call, owner)
        if name is None or path is None or path.partition(".")[0] != owner:
            continue
        texts = set(_texts(name, tree, frozenset()))
        if None in texts:
            return None
        own |= {text for text in texts if text is not None and path == owner}
    return frozenset(own)


def _target(call: ast.Call, owner: str) -> tuple[str | None, ast.expr | None]:
    """Return the path of the object whose attribute a call sets, and the name of that; None for other calls."""
    function, args = call.func, [*call.args, None, None]
    if isinstance(function, ast.Name) and function.id in SETTERS:
        return None if args[0] is None else path_of(args[0]), args[1]
    if isinstance(function, ast.Attribute) and function.attr in SETTERS:
        is_super = isinstance(function.value, ast.Call)
        bound = owner if is_super else path_of(function.value)
        if bound is not None and bound.partition(".")[0] == owner:
            return bound, args[0]
        return None if args[0] is None else path_of(args[0]), args[1]  # object.__setattr__(self, name, value)
    return None, None


def _texts(expr: ast.expr, tree: _Function, inside: frozenset[str]) -> Iterator[str | None]:
    """Yield the texts that an expression, or an item of it, may be; None where there may be others.

    Args:
        expr: part of the syntax of a function.
        tree: syntax of the function.
        inside: variables in whose values it is looked at.
    """
    match expr:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _texts(item, tree, inside)
        case ast.JoinedStr(values=parts):
            texts = [set(_texts(part, tree, inside)) for part in parts]
            for chosen in itertools.product(*texts) if math.prod(map(len, texts)) <= _MOST_NAMES else [(None,)]:
                yield None if None in chosen else "".join(chosen)  # type: ignore[arg-type]
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            yield from _texts(value, tree, inside)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_texts(body, tree, inside), *_texts(orelse, tree, inside))
        case ast.Name(id=name) if name not in inside:
            bound = bindings(tree).get(name, ())
            if not bound or name in _arguments(tree) or _is_passed_on(name, tree):
                yield None
            for binding in bound:
                yield from _texts(binding.value, tree, inside | {name})
        case ast.Name():
            return
        case _:
            yield None


def _arguments(tree: _Function) -> set[str]:
    return {node.arg for node in nodes_of(tree.args, ast.arg)}


def _is_passed_on(name: str, tree: _Function) -> bool:
    """Whether a function gets a variable as an argument, and might put something else into the list that it holds."""
    for call in nodes_of(tree, ast.Call):
        called = getattr(call.func, "id", getattr(call.func, "attr", ""))
        passed = (*call.args, *(keyword.value for keyword in call.keywords))
        if called not in _READERS and any(isinstance(value, ast.Name) and value.id == name for value in passed):
            return True
    return False
