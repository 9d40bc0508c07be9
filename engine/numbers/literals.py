"""The numbers in a call that the source fixes: literals, and globals and attributes that no code sets later.

Any other number that code passes to an op may differ in the next call: it may depend on numbers read from a tensor, on
an option, or on the state of the process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from engine.limits import MOST_DIMENSIONS
from engine.numbers.sizes import is_tagged, untracked
from engine.source.bindings import Function, arguments_of, places_set, unconditional_values
from engine.source.expressions_at import ANY_ATTRIBUTE, expression_at, file_syntax, is_literal, operands_of, parts_of
from engine.source.filled_lists import fillers
from engine.source.passed_arguments import function_of, has_fixed_default, home, passed_argument
from engine.source.reassigned import Reassigned
from engine.source.syntax import nodes_of

__all__ = ["literals_at", "reassigned_numbers", "unfixed_numbers", "without"]

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
_COMPARES: dict[type, Callable[..., bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPUTES = frozenset([abs, divmod, float, int, max, min, pow, round, *filter(callable, vars(math).values())])
_LISTS_OF_MODULES = (nn.ModuleList, nn.Sequential)


class _NotFixed(Exception):
    """Raised for an expression whose value the source does not fix."""


_OUTDATED = (ArithmeticError, LookupError, TypeError, ValueError)
"""Raised if variables have changed since the number was computed."""


class _Scope(NamedTuple):
    """Where an expression is evaluated.

    Attributes:
        frame: of the function.
        reassigned: attributes and globals that code of the model assigns later.
        sizes: whether sizes of tensors count as fixed.
        asked: variables that are being examined: ``n = n + 1`` is fixed if the earlier value of ``n`` is.
    """

    frame: FrameType
    reassigned: Reassigned
    sizes: bool = False
    asked: frozenset[tuple[int, str]] = frozenset()


def unfixed_numbers(
    numbers: Sequence[Any], frame: FrameType, reassigned: Reassigned, function: Any = None
) -> list[Any]:
    """Return the numbers in a call that the source does not fix; those computed from sizes alone as floats.

    An example of the latter is ``int(math.sqrt(tokens))``. As amounts, such numbers are covered by recordings at other
    sizes. They are returned as floats, which are never amounts, because as factors they may have any value.

    Args:
        numbers: all numbers that the called function or operator receives.
        frame: the frame that makes the call.
        reassigned: attributes and globals that code of the model assigns later.
        function: the called function, whose defaults replace the arguments that the call omits.
    """
    unfixed = without(numbers, literals_at(frame.f_code, frame.f_lasti))
    if not unfixed:
        return []
    place, fixed = expression_at(frame.f_code, frame.f_lasti), Counter[Any]()
    if isinstance(function, FunctionType):
        fixed.update(_defaults(function, frame.f_code, frame.f_lasti))
    sized = Counter[Any]()
    if isinstance(place, ast.Call) and getattr(place.func, "id", "") == "sum" and len(place.args) == 1:
        fixed += _counted([0])  # where a sum begins
    operands = _variables(frame.f_code, frame.f_lasti)
    for expr, own in (part for operand in operands for part in _elements(operand, frame)):
        for kind, sizes in ((fixed, False), (sized, True)):
            try:
                kind.update(_counted(_flat(_value(expr, _Scope(own, reassigned, sizes)))))
            except (_NotFixed, *_OUTDATED):
                continue
            break
    unfixed = without(unfixed, fixed)
    others = without(unfixed, sized)
    return [*others, *map(float, without(unfixed, _counted(others)))]


def reassigned_numbers(numbers: Sequence[Any], frame: FrameType, reassigned: Reassigned) -> list[Any]:
    """Return the numbers in a call of one of torch's layers that it reads from attributes that other code assigns.

    Args:
        numbers, reassigned: as for `unfixed_numbers`.
        frame: the frame of the layer that makes the call.
    """
    layer = frame.f_locals.get("self")
    read = [e.attr for e in _variables(frame.f_code, frame.f_lasti) if isinstance(e, ast.Attribute)]
    own = [vars(layer)[name] for name in read if name in vars(layer) and reassigned.attribute(layer, name)]
    return [number for number in numbers if _with_kind(number) in _counted(_flat(own))]


def _counted(numbers: Iterable[Any]) -> Counter[Any]:
    """Count numbers by value and type, because False is not 0, and 1.0 is no amount."""
    return Counter(map(_with_kind, numbers))


def _with_kind(number: Any) -> tuple[type, Any]:
    return bool if isinstance(number, bool) else float if isinstance(number, float) else int, number


def without(numbers: Sequence[Any], fixed: Mapping[Any, int]) -> list[Any]:
    """Return the numbers without the fixed ones, counting repetitions."""
    left, unfixed = dict(fixed), []
    for number in numbers:
        key = _with_kind(number)
        if left.get(key, 0) > 0:
            left[key] -= 1
        else:
            unfixed.append(number)
    return unfixed


@functools.lru_cache(maxsize=10_000)
def literals_at(code: CodeType, instruction: int) -> Counter[Any]:
    """Return the literal numbers in the expression that a function is evaluating."""
    operands = operands_of(expression_at(code, instruction))
    return _counted(number for expr in operands if is_literal(expr) for number in _flat(ast.literal_eval(expr)))


@functools.lru_cache(maxsize=10_000)
def _variables(code: CodeType, instruction: int) -> list[ast.expr]:
    """Return the operands, except literals, of the expression that a function is evaluating."""
    return [operand for operand in operands_of(expression_at(code, instruction)) if not is_literal(operand)]


@functools.lru_cache(maxsize=1000)
def _defaults(function: FunctionType, code: CodeType, instruction: int) -> Counter[Any]:
    """Return the numbers among the defaults of the arguments that a call omits."""
    place = expression_at(code, instruction)
    if not isinstance(place, ast.Call):
        return Counter()
    if any(isinstance(a, ast.Starred) for a in place.args) or any(k.arg is None for k in place.keywords):
        return Counter()
    passed = {keyword.arg for keyword in place.keywords}
    further = list(_signature(function).parameters.values())[len(place.args) :]
    return _counted(number for p in further if p.name not in passed for number in _flat(p.default))


def _signature(function: FunctionType) -> inspect.Signature:
    """Return the signature of a function, or of those to which a torch function passes on its arguments."""
    signature = inspect.signature(function)
    if any(p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        return signature
    inner = [cell.cell_contents for cell in function.__closure__ or ()]
    return next((inspect.signature(own) for own in inner if isinstance(own, FunctionType)), signature)


def _elements(expr: ast.expr, frame: FrameType) -> list[tuple[ast.expr, FrameType]]:
    """Return the elements of the tuple that a variable holds, as in ``shape = (*x.shape[:2], -1, self.width)``.

    Each comes with the frame that it belongs to: a tuple may be an argument, built by the caller. If the variable, or
    one that its elements read, has other assignments, only the numbers that occur in all of its tuples are returned.
    Any other expression is returned unchanged.
    """
    expr = expr.value if isinstance(expr, ast.Starred) else expr
    frame = home(expr.id, frame) if isinstance(expr, ast.Name) else frame
    if isinstance(expr, (ast.Tuple, ast.BinOp)):
        tuples = [summand for summand in _summands(expr) if isinstance(summand, ast.Tuple)]
        return [(part, frame) for summand in tuples for part in parts_of(summand)] or [(expr, frame)]
    function = function_of(frame) if isinstance(expr, ast.Name) and expr.id in frame.f_locals else None
    if function is None or not isinstance(expr, ast.Name):
        return [(expr, frame)]
    held, places = frame.f_locals[expr.id], places_set(function, expr.id)
    if type(held) is list and (rest := fillers(function, expr.id)):  # other items are sizes, or not fixed
        return [(ast.Constant(item), frame) for item in held if type(item) is int and item in rest]
    if expr.id in arguments_of(function) and not places and isinstance(held, tuple):
        passed = passed_argument(expr.id, frame)
        if passed is not None and passed.expression is not None:
            return _elements(passed.expression, passed.frame)
    return [(part, frame) for part in _assigned_elements(expr, function)]


def _assigned_elements(name: ast.Name, function: Function) -> list[ast.expr]:
    """Return the elements of the tuples that a function assigns to a variable, or the variable if there are others."""
    values = [s.value for s in nodes_of(function, ast.Assign) if _targets(s) == [name.id]]
    tuples = [[s for s in _summands(value) if isinstance(s, ast.Tuple)] for value in values]
    if not tuples or not all(tuples) or len(tuples) != len(places_set(function, name.id)):
        return [name]
    parts = [[part for summand in summands for part in parts_of(summand)] for summands in tuples]
    names = {n.id for n in ast.walk(values[0]) if isinstance(n, ast.Name)}
    passed = arguments_of(function)
    if len(parts) == 1 and all(len(places_set(function, name)) <= (name not in passed) for name in names):
        return parts[0]
    shared = [_counted(_flat([ast.literal_eval(part) for part in own if is_literal(part)])) for own in parts]
    return [ast.Constant(number) for _, number in functools.reduce(operator.and_, shared).elements()]


def _summands(expr: ast.expr) -> list[ast.expr]:
    """Return the operands of a chain of sums; any other expression is its only one.

    A repeated tuple, as in ``(x.shape[0],) + (1,) * (x.ndim - 1)``, is repeated as often as a tensor may have
    dimensions.
    """
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        return [*_summands(expr.left), *_summands(expr.right)]
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mult) and isinstance(expr.left, ast.Tuple):
        return [expr.left] * MOST_DIMENSIONS
    return [expr]


def _targets(assignment: ast.Assign) -> list[str | None]:
    return [t.id if isinstance(t, ast.Name) else None for t in assignment.targets]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, int, float)):
        yield untracked(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _value(expr: ast.expr, scope: _Scope) -> Any:
    """Return the current value of an expression that the source fixes.

    Raises:
        _NotFixed: if the source does not fix it.
    """
    if isinstance(expr, ast.Constant):
        return expr.value
    if scope.sizes and (size := _size(expr, scope.frame)) is not None:
        return size
    if isinstance(expr, (ast.UnaryOp, ast.BinOp)) and type(expr.op) in _OPERATORS:
        sides = [expr.operand] if isinstance(expr, ast.UnaryOp) else [expr.left, expr.right]
        values = [_value(side, scope) for side in sides]
        if all(isinstance(value, (bool, int, float)) for value in values):
            return _OPERATORS[type(expr.op)](*values)
    if isinstance(expr, (ast.Tuple, ast.List)):
        return [_value(element, scope) for element in expr.elts]
    if isinstance(expr, ast.Call) and not expr.keywords:
        return _result(_owner(expr.func, scope), [_value(argument, scope) for argument in expr.args], scope)
    if isinstance(expr, ast.Compare) and len(expr.ops) == 1 and type(expr.ops[0]) in _COMPARES:
        return _COMPARES[type(expr.ops[0])](_value(expr.left, scope), _value(expr.comparators[0], scope))
    if isinstance(expr, ast.IfExp):
        return _value(expr.body if _value(expr.test, scope) else expr.orelse, scope)
    if isinstance(expr, ast.Attribute):
        return _attribute(_owner(expr.value, scope), expr.attr, scope)
    if isinstance(expr, ast.Name):
        scope = scope._replace(frame=home(expr.id, scope.frame))
        own = (*scope.frame.f_code.co_varnames, *scope.frame.f_code.co_cellvars)
        return _local(expr.id, scope) if expr.id in own else _global(expr.id, scope)
    raise _NotFixed


def _size(expr: ast.expr, frame: FrameType) -> int | float | None:
    """Return a number that is a size of a tensor, or was computed from sizes; None for any other expression."""
    match expr:
        case ast.Name():
            held = _held(expr, frame)
            return untracked(held) if is_tagged(held) else None
        case (
            ast.Subscript(value=ast.Attribute(value=of, attr="shape"), slice=dim)
            | ast.Call(func=ast.Attribute(value=of, attr="size"), args=[dim])
        ):
            held = _held(of, frame)
            return held.shape[ast.literal_eval(dim)] if isinstance(held, Tensor) and is_literal(dim) else None
        case ast.Call(func=ast.Name(id="len"), args=[of]):
            held = _held(of, frame)
            return held.shape[0] if isinstance(held, Tensor) else None
    return None


def _held(expr: ast.expr, frame: FrameType) -> Any:
    """Return the value of a variable, or of an item that the code names literally; None for any other expression."""
    if isinstance(expr, ast.Name):
        return home(expr.id, frame).f_locals.get(expr.id)
    if not isinstance(expr, ast.Subscript) or not is_literal(expr.slice):
        return None
    whole: Any = _held(expr.value, frame)
    return whole[ast.literal_eval(expr.slice)] if type(whole) in (list, tuple, dict) else None


def _result(function: Any, arguments: Sequence[Any], scope: _Scope) -> Any:
    """Return the result of a function that computes a number from numbers alone, or counts the modules in a list.

    If sizes count as fixed, so do the results of other functions of them, although they are unknown: None.

    Raises:
        _NotFixed: for any other function.
    """
    function = inspect.unwrap(function)  # the functions of `math` are tracked while a model runs
    if function is len and isinstance(arguments[0], _LISTS_OF_MODULES):
        return len(arguments[0])
    if function in _COMPUTES and all(isinstance(value, (bool, int, float)) for value in arguments):
        return function(*arguments)
    if scope.sizes and isinstance(function, FunctionType):
        return None
    raise _NotFixed


def _owner(expr: ast.expr, scope: _Scope) -> Any:
    """Return the object whose attribute is read: ``self``, a Python module, or an attribute of these."""
    if isinstance(expr, ast.Attribute):
        return _attribute(_owner(expr.value, scope), expr.attr, scope)
    scope = scope._replace(frame=home(expr.id, scope.frame)) if isinstance(expr, ast.Name) else scope
    code, own = scope.frame.f_code, scope.frame.f_locals
    if isinstance(expr, ast.Name) and code.co_argcount and expr.id == code.co_varnames[0] and expr.id in own:
        return own[expr.id]
    if isinstance(expr, ast.Name) and expr.id not in (*code.co_varnames, *code.co_cellvars):
        return _global(expr.id, scope)
    raise _NotFixed


def _attribute(owner: Any, name: str, scope: _Scope) -> Any:
    """Return an attribute that only constructors set, without running any code."""
    later = file_syntax(scope.frame.f_code).attributes_set_later
    is_set_here = not later.isdisjoint((name, ANY_ATTRIBUTE)) and not isinstance(owner, ModuleType)
    if is_set_here or scope.reassigned.attribute(owner, name):
        raise _NotFixed
    own = getattr(owner, "__dict__", {})
    for table in (own, own.get("_modules", {})):
        if name in table:
            return untracked(table[name])
    value = inspect.getattr_static(owner, name, None)
    if value is None or hasattr(value, "__get__"):
        raise _NotFixed
    return value


def _global(name: str, scope: _Scope) -> Any:
    for space in (scope.frame.f_globals, scope.frame.f_builtins):
        if name in space:
            if any(True for _ in _flat(space[name])) and scope.reassigned.variable(space["__name__"], name):
                raise _NotFixed
            return space[name]
    raise _NotFixed  # a variable of an enclosing function


def _local(name: str, scope: _Scope) -> Any:
    """Return the value of a variable whose assignments, or of an argument whose call, the source fixes.

    All assignments are unconditional, or there is only one: if the variable has a value, it has this one.
    """
    function = function_of(scope.frame)
    if function is None or name not in scope.frame.f_locals:
        raise _NotFixed
    if name in arguments_of(function):
        if places_set(function, name):
            raise _NotFixed
        return _argument(name, scope)
    assigned, key = unconditional_values(function, name), (id(scope.frame), name)
    if not assigned:
        raise _NotFixed
    inner = scope._replace(asked=scope.asked | {key})
    for value in () if key in scope.asked else assigned:
        _value(value, inner)
    return untracked(scope.frame.f_locals[name])


def _argument(name: str, scope: _Scope) -> Any:
    """Return the value of an argument that the source of the caller, or a default, fixes.

    Raises:
        _NotFixed: if the function is called by another name, or with an unpacked sequence or mapping.
    """
    passed = passed_argument(name, scope.frame)
    if passed is None:
        raise _NotFixed
    if passed.expression is not None:
        _value(passed.expression, _Scope(passed.frame, scope.reassigned, scope.sizes))
    elif not has_fixed_default(name, scope.frame):
        raise _NotFixed
    return untracked(scope.frame.f_locals[name])
