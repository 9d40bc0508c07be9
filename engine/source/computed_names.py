"""Names of attributes that code sets by a function: ``for name in ("encoder", "body"): setattr(self, name, x)``."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator
from types import CodeType

from engine.limits import MOST_COMPUTED_NAMES
from engine.source.bindings import bindings, path_of
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of

__all__ = ["SETTERS", "names_set_by_functions"]

SETTERS = frozenset(["setattr", "delattr", "__setattr__", "__delattr__"])
"""Functions and methods that set an attribute by its name."""


_READERS = frozenset(["getattr", "hasattr", "len", "print", *SETTERS])

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_set_by_functions(code: CodeType, owner: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the names of attributes that functions such as ``setattr`` set, if the code contains these names.

    Args:
        code: of a function.
        owner: the variable whose attributes are listed separately.

    Returns:
        The names of the variable's own attributes, and of those of other objects; None if some name cannot be
        determined under which the variable, or an object that it holds, may get an attribute.

    Example:
        >>> def replace(net, part):
        ...     places = ["encoder", "body"]
        ...     for name in places:
        ...         if hasattr(net, name):
        ...             setattr(net, name, part)
        >>> own, others = names_set_by_functions(replace.__code__, "net")
        >>> sorted(own), sorted(others)
        (['body', 'encoder'], [])
    """
    tree = syntax_of(code)
    if tree is None:
        return None
    own, others = set[str](), set[str]()
    calls = {call.func: call for call in nodes_of(tree, ast.Call)}
    for function in nodes_of(tree, ast.Name, ast.Attribute):
        if (function.id if isinstance(function, ast.Name) else function.attr) not in SETTERS:
            continue
        call = calls.get(function)
        target = None if call is None else _target(call, owner)
        if target is None:  # partial(setattr, self)
            return None
        holder, name = target
        texts, may_be_own = set(_texts(name, tree, frozenset())), _may_be(holder, owner, tree)
        if None in texts and may_be_own:
            return None
        is_own = may_be_own and not isinstance(holder, ast.Attribute)
        (own if is_own else others).update(text for text in texts if text is not None)
    return frozenset(own), frozenset(others)


def _target(call: ast.Call, owner: str) -> tuple[ast.expr, ast.expr] | None:
    """Return the object whose attribute a call sets, and the attribute's name; None if these cannot be determined."""
    function, args = call.func, call.args
    if any(isinstance(argument, ast.Starred) for argument in args):
        return None
    if isinstance(function, ast.Attribute) and len(args) == (2 if function.attr == "__setattr__" else 1):
        bound = function.value
        return (ast.Name(owner) if isinstance(bound, ast.Call) else bound), args[0]  # super().__setattr__(name, value)
    return (args[0], args[1]) if len(args) > 1 else None


def _may_be(holder: ast.expr, owner: str, tree: _Function) -> bool:
    """Whether an expression starts from a variable, or from one that holds nothing but it or its parts."""
    root = holder
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(root, ast.Name) or root.id == owner:
        return True
    values = [binding.value for binding in bindings(tree).get(root.id, ())]
    return bool(values) and all((path_of(value) or "").partition(".")[0] == owner for value in values)


def _texts(expr: ast.expr, tree: _Function, inside: frozenset[str]) -> Iterator[str | None]:
    """Yield the strings that an expression, or an item of it, may be; None if there may be others.

    Args:
        expr: part of the syntax of a function.
        tree: syntax of the function.
        inside: variables whose values are being examined.
    """
    match expr:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _texts(item, tree, inside)
        case ast.JoinedStr(values=parts):
            texts = [set(_texts(part, tree, inside)) for part in parts]
            for chosen in itertools.product(*texts) if math.prod(map(len, texts)) <= MOST_COMPUTED_NAMES else [(None,)]:
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
    """Whether a function receives a variable as an argument, and may change the list that it holds."""
    for call in nodes_of(tree, ast.Call):
        called = getattr(call.func, "id", getattr(call.func, "attr", ""))
        passed = (*call.args, *(keyword.value for keyword in call.keywords))
        if called not in _READERS and any(isinstance(value, ast.Name) and value.id == name for value in passed):
            return True
    return False
