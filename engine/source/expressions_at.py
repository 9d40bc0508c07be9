"""The expression that a function is evaluating when it calls something, and the syntax of its file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from engine.source.function_text import edited_syntax, syntax_of_file, text_of
from engine.source.instructions import cached_by_identity

__all__ = ["ANY_ATTRIBUTE", "FileSyntax", "expression_at", "file_syntax", "is_literal", "operands_of", "parts_of"]

Span = tuple[int, int, int, int]

ANY_ATTRIBUTE = "*"
"""Stands for all attributes, if a method sets one under a computed name."""

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "reset_parameters")


@dataclass(frozen=True)
class FileSyntax:
    """The syntax of a file.

    Attributes:
        places: expressions and augmented assignments by position.
        functions: function definitions by their first line, which may be that of a decorator.
        attributes_set_later: names of attributes that are set outside of constructors.
    """

    places: Mapping[Span, ast.AST]
    functions: Mapping[int, ast.FunctionDef | ast.AsyncFunctionDef]
    attributes_set_later: frozenset[str]


def is_literal(expr: ast.expr) -> bool:
    """Whether an expression is a constant, or a negative number."""
    negated = isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.USub)
    return isinstance(expr.operand if isinstance(expr, ast.UnaryOp) and negated else expr, ast.Constant)


def expression_at(code: CodeType, instruction: int) -> ast.AST | None:
    """Return the expression that a function is evaluating; None without source."""
    spans = _spans(code)
    span = spans[instruction // 2] if instruction // 2 < len(spans) else None
    return None if span is None else file_syntax(code).places.get(span)


@functools.cache
def _spans(code: CodeType) -> list[Span | None]:
    spans = ((line, column, end, last) for line, end, column, last in code.co_positions())
    return [None if None in span else span for span in spans]  # type: ignore[misc]


@cached_by_identity
def file_syntax(code: CodeType) -> FileSyntax:
    """Return the syntax of the file of a function; empty without source."""
    whole, edited = _contents(text_of(code)), edited_syntax(code)
    return whole if edited is None else _of_tree(edited, whole.attributes_set_later)


@functools.lru_cache(maxsize=64)
def _contents(text: str) -> FileSyntax:
    try:
        return _of_tree(syntax_of_file(text), ())
    except SyntaxError:
        return FileSyntax({}, {}, frozenset())


def _of_tree(tree: ast.AST, attributes_set_later: Iterable[str]) -> FileSyntax:
    nodes = list(ast.walk(tree))
    places: dict[Span, ast.AST] = {
        span: node
        for node in nodes
        if isinstance(node, (ast.expr, ast.AugAssign)) and type(node) in _OPERANDS
        for span in _spans_of(node)
    }
    writes = ((node, target) for node in nodes if isinstance(node, ast.Assign) for target in node.targets)
    places |= {next(_spans_of(target)): node for node, target in writes if isinstance(target, ast.Subscript)}
    functions = {
        min([node.lineno, *(d.lineno for d in node.decorator_list)]): node
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    own = {name for f in functions.values() if f.name not in _CONSTRUCTORS for name in _attributes_set(f)}
    return FileSyntax(places, functions, frozenset(own.union(attributes_set_later)))


def _spans_of(node: ast.expr | ast.AugAssign) -> Iterator[Span]:
    """Yield the positions that Python records for the instruction of an expression.

    A method that is called on another line than its object starts at the name of the method.
    """
    end = node.end_lineno or 0, node.end_col_offset or 0
    yield (node.lineno, node.col_offset, *end)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.lineno != node.func.end_lineno:
        yield (node.func.end_lineno or 0, (node.func.end_col_offset or 0) - len(node.func.attr), *end)


def _attributes_set(function: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes that a function sets, except copied ones: ``new.eps = old.eps``."""
    assigned = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    copies = {
        t for node in assigned for t in node.targets if getattr(t, "attr", "") == getattr(node.value, "attr", None)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node not in copies:
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
            if len(node.args) == 3 and getattr(node.args[0], "id", "") == "self":
                yield from () if isinstance(node.args[1], ast.Constant) else (ANY_ATTRIBUTE,)


def _of_call(call: Any) -> list[ast.expr]:
    own = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*call.args, *(keyword.value for keyword in call.keywords), *own]


def _of_assignment(place: Any) -> list[ast.expr]:
    targets = place.targets if isinstance(place, ast.Assign) else [place.target]
    return [place.value, *(target.slice for target in targets if isinstance(target, ast.Subscript))]


_OPERANDS: dict[type, Callable[[Any], list[ast.expr]]] = {
    ast.Call: _of_call,
    ast.BinOp: lambda place: [place.left, place.right],
    ast.UnaryOp: lambda place: [place.operand],
    ast.Compare: lambda place: [place.left, *place.comparators],
    ast.Assign: _of_assignment,
    ast.AugAssign: _of_assignment,
    ast.Subscript: lambda place: [place.slice],
}


def operands_of(place: ast.AST | None) -> list[ast.expr]:
    """Return the operands of a call, an operator or a subscript."""
    operands = _OPERANDS.get(type(place), lambda _: [])(place)
    return [part for expr in operands for part in parts_of(expr)]


def parts_of(expr: ast.expr) -> list[ast.expr]:
    """Return the elements of a tuple, list or slice; of any other expression, the expression itself."""
    if isinstance(expr, (ast.Tuple, ast.List)):
        return [part for element in expr.elts for part in parts_of(element)]
    if isinstance(expr, ast.Slice):
        bounds = [bound for bound in (expr.lower, expr.upper, expr.step) if bound is not None]
        return [part for bound in bounds for part in parts_of(bound)]
    return [expr]
