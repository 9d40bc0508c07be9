"""Which numbers in a call are fixed by the source: literals, globals, and attributes that only ``__init__`` sets.

Once code has read a number from a tensor, the numbers that it passes to ops may be computed from that number, or chosen
by it. Literals in the source of the call, and attributes that nothing changes, are neither.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from engine.source.function_text import syntax_of_file, text_of
from engine.source.syntax import nodes_of

__all__ = ["unfixed_numbers"]

Span = tuple[int, int, int, int]

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "reset_parameters")


class _NotFixed(Exception):
    """Raised for an expression whose value the source does not fix."""


@dataclass(frozen=True)
class _File:
    """The syntax of a file.

    Attributes:
        places: expressions and augmented assignments by position.
        functions: function definitions by their first line, which may be that of a decorator.
        attributes_set_later: names of attributes that are set outside of constructors.
    """

    places: Mapping[Span, ast.AST]
    functions: Mapping[int, ast.FunctionDef | ast.AsyncFunctionDef]
    attributes_set_later: frozenset[str]


def unfixed_numbers(numbers: Sequence[Any], frame: FrameType) -> list[Any]:
    """Return the numbers in a call that its source does not fix.

    Args:
        numbers: all numbers that the called function or operator receives.
        frame: the frame that makes the call.
    """
    place = _place(frame)
    fixed: Counter[Any] = Counter()
    for expr in (part for operand in _operands(place) for part in _elements(operand, frame)):
        try:
            fixed.update(_flat(_value(expr, frame)))
        except _NotFixed:
            continue
    unfixed = []
    for number in numbers:
        if fixed[number] > 0:
            fixed[number] -= 1
        else:
            unfixed.append(number)
    return unfixed


def _place(frame: FrameType) -> ast.AST | None:
    """Return the expression that a frame is evaluating; None without source."""
    code = frame.f_code
    spans = _spans(code)
    span = spans[frame.f_lasti // 2] if frame.f_lasti // 2 < len(spans) else None
    return None if span is None else _file(code).places.get(span)


@functools.cache
def _spans(code: CodeType) -> list[Span | None]:
    spans = ((line, column, end, last) for line, end, column, last in code.co_positions())
    return [None if None in span else span for span in spans]  # type: ignore[misc]


@functools.cache
def _file(code: CodeType) -> _File:
    return _contents(text_of(code))


@functools.lru_cache(maxsize=64)
def _contents(text: str) -> _File:
    try:
        tree = syntax_of_file(text)
    except SyntaxError:
        return _File({}, {}, frozenset())
    places = {
        (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0): node
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.AugAssign)) and type(node) in _OPERANDS
    }
    functions = {
        min([node.lineno, *(d.lineno for d in node.decorator_list)]): node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    attributes_set_later = {
        name for f in functions.values() if f.name not in _CONSTRUCTORS for name in _attributes_set(f)
    }
    return _File(places, functions, frozenset(attributes_set_later))


def _attributes_set(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _of_call(call: Any) -> list[ast.expr]:
    own = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*call.args, *(keyword.value for keyword in call.keywords), *own]


def _of_assignment(place: Any) -> list[ast.expr]:
    return [place.value, *([place.target.slice] if isinstance(place.target, ast.Subscript) else [])]


_OPERANDS: dict[type, Callable[[Any], list[ast.expr]]] = {
    ast.Call: _of_call,
    ast.BinOp: lambda place: [place.left, place.right],
    ast.UnaryOp: lambda place: [place.operand],
    ast.Compare: lambda place: [place.left, *place.comparators],
    ast.AugAssign: _of_assignment,
    ast.Subscript: lambda place: [place.slice],
}


def _operands(place: ast.AST | None) -> list[ast.expr]:
    """Return the operands of a call, an operator or a subscript."""
    operands = _OPERANDS.get(type(place), lambda _: [])(place)
    return [part for expr in operands for part in _parts(expr)]


def _parts(expr: ast.expr) -> list[ast.expr]:
    """Return the elements of a tuple, list or slice; of any other expression, the expression itself."""
    if isinstance(expr, (ast.Tuple, ast.List)):
        return [part for element in expr.elts for part in _parts(element)]
    if isinstance(expr, ast.Slice):
        bounds = [bound for bound in (expr.lower, expr.upper, expr.step) if bound is not None]
        return [part for bound in bounds for part in _parts(bound)]
    return [expr]


def _elements(expr: ast.expr, frame: FrameType) -> list[ast.expr]:
    """Return the elements of the tuple that a variable stands for, as in ``shape = (*x.shape[:2], -1, self.width)``.

    The variable has no other assignment, nor have those that its elements read. Any other expression is returned as it
    is.
    """
    expr = expr.value if isinstance(expr, ast.Starred) else expr
    function = _function(frame) if isinstance(expr, ast.Name) and expr.id in frame.f_locals else None
    if function is None or not isinstance(expr, ast.Name):
        return [expr]
    tuples = [s for s in nodes_of(function, ast.Assign) if isinstance(s.value, ast.Tuple) and _targets(s) == [expr.id]]
    if len(tuples) != 1 or len(_bindings(function, expr.id)) != 1:
        return [expr]
    names = {n.id for n in ast.walk(tuples[0].value) if isinstance(n, ast.Name)}
    arguments = function.args
    passed = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if any(len(_bindings(function, name)) > (name not in passed) for name in names):
        return [expr]
    return _parts(tuples[0].value)


def _function(frame: FrameType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    return _file(frame.f_code).functions.get(frame.f_code.co_firstlineno)


def _targets(assignment: ast.Assign) -> list[str | None]:
    return [t.id if isinstance(t, ast.Name) else None for t in assignment.targets]


def _bindings(function: ast.AST, name: str) -> list[ast.Name]:
    return [n for n in nodes_of(function, ast.Name) if n.id == name and not isinstance(n.ctx, ast.Load)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, int, float)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _value(expr: ast.expr, frame: FrameType) -> Any:
    """Return the current value of an expression that the source fixes.

    Raises:
        _NotFixed: if the source does not fix it.
    """
    if isinstance(expr, ast.Constant):
        return expr.value
    if isinstance(expr, (ast.UnaryOp, ast.BinOp)) and type(expr.op) in _OPERATORS:
        sides = [expr.operand] if isinstance(expr, ast.UnaryOp) else [expr.left, expr.right]
        values = [_value(side, frame) for side in sides]
        if all(isinstance(value, (bool, int, float)) for value in values):
            return _OPERATORS[type(expr.op)](*values)
    if isinstance(expr, (ast.Tuple, ast.List)):
        return [_value(element, frame) for element in expr.elts]
    if isinstance(expr, ast.IfExp):
        return _value(expr.body if _value(expr.test, frame) else expr.orelse, frame)
    if isinstance(expr, ast.Attribute):
        return _attribute(_owner(expr.value, frame), expr.attr, frame)
    if isinstance(expr, ast.Name):
        return _local(expr.id, frame) if expr.id in frame.f_code.co_varnames else _global(expr.id, frame)
    raise _NotFixed


def _owner(expr: ast.expr, frame: FrameType) -> Any:
    """Return the object whose attribute is read: ``self``, a Python module, or an attribute of these."""
    if isinstance(expr, ast.Attribute):
        return _attribute(_owner(expr.value, frame), expr.attr, frame)
    code = frame.f_code
    if isinstance(expr, ast.Name) and code.co_argcount and expr.id == code.co_varnames[0] and expr.id in frame.f_locals:
        return frame.f_locals[expr.id]
    if isinstance(expr, ast.Name) and expr.id not in code.co_varnames:
        return _global(expr.id, frame)
    raise _NotFixed


def _attribute(owner: Any, name: str, frame: FrameType) -> Any:
    """Return an attribute that only constructors in the file set, without running any code."""
    if name in _file(frame.f_code).attributes_set_later and not isinstance(owner, ModuleType):
        raise _NotFixed
    own = getattr(owner, "__dict__", {})
    for table in (own, own.get("_modules", {})):
        if name in table:
            return table[name]
    value = inspect.getattr_static(owner, name, None)
    if value is None or hasattr(value, "__get__"):
        raise _NotFixed
    return value


def _global(name: str, frame: FrameType) -> Any:
    for space in (frame.f_globals, frame.f_builtins):
        if name in space:
            return space[name]
    raise _NotFixed  # a variable of an enclosing function


def _local(name: str, frame: FrameType) -> Any:
    """Return the value of a variable whose assignments, or of an argument whose call, the source fixes.

    All assignments are unconditional, or there is only one: if the variable has a value, it has this one.
    """
    function = _function(frame)
    if function is None or name not in frame.f_locals:
        raise _NotFixed
    bindings = _bindings(function, name)
    if name in (a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)):
        if bindings:
            raise _NotFixed
        return _argument(name, function.args, frame)
    alone = nodes_of(function) if len(bindings) == 1 else function.body
    assigned = [s.value for s in alone if isinstance(s, ast.Assign) and all(t in bindings for t in s.targets)]
    if not assigned or len(assigned) != len(bindings):
        raise _NotFixed
    for value in assigned:
        _value(value, frame)
    return frame.f_locals[name]


def _argument(name: str, arguments: ast.arguments, frame: FrameType) -> Any:
    """Return the value of an argument of a plain function that the source of the caller, or a default, fixes.

    Raises:
        _NotFixed: if the function is called by another name, or with an unpacked sequence or mapping.
    """
    caller = frame.f_back
    place = None if caller is None else _place(caller)
    if caller is None or not isinstance(place, ast.Call):
        raise _NotFixed
    function = _value(place.func, caller)
    if not isinstance(function, FunctionType) or function.__code__ is not frame.f_code:
        raise _NotFixed
    if any(isinstance(a, ast.Starred) for a in place.args) or any(k.arg is None for k in place.keywords):
        raise _NotFixed
    passed: dict[str, ast.expr] = dict(
        zip([a.arg for a in (*arguments.posonlyargs, *arguments.args)], place.args, strict=False)
    )
    passed.update({k.arg: k.value for k in place.keywords if k.arg is not None})
    if name in passed:
        _value(passed[name], caller)
    return frame.f_locals[name]
