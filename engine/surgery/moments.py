"""Means and variances over channels in a syntax tree, rewritten to count removed channels as the zeros they were.

Over n channels, of which those in the tensor remain and the others were zero, a mean is the sum divided by n. Behind
the subtraction of the mean u, removed channels hold -u, so that the mean of squares is

    mean((x - u)^2) = sum(x (x - 2 u)) / n + u^2,

whose terms vanish where x is zero. A variance is the mean of x^2 less u^2. If a share f of the channels is zero, u^2 is
at most (1 - f) / f times the variance: the subtraction cancels no more than that.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import NamedTuple

from engine.flow.reaching import definitions_before

__all__ = ["average_squares", "divide_total", "spread_out"]


_COMPUTED = (ast.Call, ast.BinOp, ast.Subscript, ast.Starred, ast.NamedExpr)
"""Arguments that must not be evaluated twice, or hold numbers that other pins replace."""


class _Reduction(NamedTuple):
    """A call that reduces a tensor, as a method of it or as a function of torch.

    Attributes:
        name: of the method or function.
        tensor: the expression of the tensor.
        args, keywords: the other arguments.
    """

    name: str
    tensor: ast.expr
    args: Sequence[ast.expr]
    keywords: Sequence[ast.keyword]

    @classmethod
    def of(cls, call: ast.AST, *names: str) -> _Reduction | None:
        """Read a call of a function whose name begins like that; return None if it has another form."""
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[tensor, *args]):
                own = cls(name, tensor, args, call.keywords)
            case ast.Call(func=ast.Attribute(value=tensor, attr=name), args=args):
                own = cls(name, tensor, args, call.keywords)
            case _:
                return None
        if not name.startswith(names):
            return None
        others = [*own.args, *(keyword.value for keyword in own.keywords)]
        is_computed = any(isinstance(node, _COMPUTED) for other in others for node in ast.walk(other))
        return None if is_computed else own

    def method(self, tensor: ast.expr, name: str) -> ast.expr:
        """Return a call of another method with copies of the same arguments."""
        args, keywords = copy.deepcopy([*self.args]), copy.deepcopy([*self.keywords])
        return ast.Call(ast.Attribute(tensor, name, ast.Load()), args, keywords)

    def average(self, tensor: ast.expr, count: float, place: int) -> ast.expr:
        """Return the mean of a tensor over the same dimensions, with as many channels as there were."""
        if not place:
            return _method(self.method(tensor, "sum"), "div", ast.Constant(count))
        keepdim = [ast.keyword("keepdim", ast.Constant(True))]
        total = ast.Call(ast.Attribute(tensor, "sum", ast.Load()), [ast.Constant(place - (place > 0))], keepdim)
        return self.method(_method(total, "div", ast.Constant(count)), "mean")


def divide_total(function: ast.FunctionDef, call: ast.Call, count: float, place: int) -> ast.expr | None:
    """Return a mean over as many channels as there were; None if the call has another form.

    Args:
        function: the function that makes the call; may be changed.
        call: the call of ``mean``.
        count: number of channels.
        place: 0 if the call reduces the channels alone; otherwise their dimension, plus one where that is not negative.

    Example:
        >>> function = ast.parse("def f(x): return torch.mean(x, 1), x.mean((1, 2))").body[0]
        >>> [ast.unparse(divide_total(function, c, 8, place)) for place, c in zip((0, 2), function.body[0].value.elts)]
        ['x.sum(1).div(8)', 'x.sum(1, keepdim=True).div(8).mean((1, 2))']
    """
    mean = _Reduction.of(call, "mean")
    return None if mean is None else mean.average(mean.tensor, count, place)


def average_squares(function: ast.FunctionDef, call: ast.Call, count: float, place: int) -> ast.expr | None:
    """Return the mean of squares of ``x - u`` over as many channels as there were; None if the code has another form.

    Args:
        function: the function that makes the call; where it subtracts in a statement of its own, that is changed.
        call: the call of ``mean``.
        count, place: as for `divide_total`.

    Example:
        >>> function = ast.parse("def f(x, u):\\n  d = x - u\\n  return (d * d).mean(1)").body[0]
        >>> function.body[1].value = average_squares(function, function.body[1].value, 8, 0)
        >>> print(ast.unparse(function.body))
        d = (_x_3_24 := x) - (_u_3_24 := u)
        return (_x_3_24 * (_x_3_24 - 2 * _u_3_24)).sum(1).div(8).add(_u_3_24.square().mean(1))
    """
    mean = _Reduction.of(call, "mean")
    centred = None if mean is None else _squared(mean.tensor)
    difference = None if centred is None else _difference(function, centred)
    if mean is None or difference is None:
        return None
    is_here = difference is centred  # or before, and variables may have other values by now
    (first_x, x), (first_u, u) = (
        _named(side, f"_{name}_{call.end_lineno}_{call.end_col_offset}", may_keep=is_here)
        for name, side in zip("xu", _sides(difference), strict=True)
    )
    if not is_here:
        _put_sides(difference, first_x, first_u)
        first_x, first_u = x, u
    product = ast.BinOp(first_x, ast.Mult(), ast.BinOp(x, ast.Sub(), ast.BinOp(ast.Constant(2), ast.Mult(), first_u)))
    return _method(mean.average(product, count, place), "add", mean.method(_method(u, "square"), "mean"))


def _difference(function: ast.FunctionDef, value: ast.expr) -> ast.expr | None:
    """Return the subtraction that computes a value, here or in the assignment of a variable; None if there is none."""
    if isinstance(value, ast.Name):
        last = list(definitions_before(function, value.id, value) or ())
        if len(last) != 1 or last[0].value is None:
            return None
        value = last[0].value
    return value if _sides(value) else None


def _sides(difference: ast.expr) -> Sequence[ast.expr]:
    """Return what is subtracted from, and what is subtracted; nothing if an expression is no subtraction.

    Example:
        >>> texts = ("x - u", "x.sub(u)", "torch.sub(x, u)", "x.sub(u, alpha=2)", "x + u")
        >>> [[ast.unparse(side) for side in _sides(ast.parse(text, mode="eval").body)] for text in texts]
        [['x', 'u'], ['x', 'u'], ['x', 'u'], [], []]
    """
    if isinstance(difference, ast.BinOp):
        return (difference.left, difference.right) if isinstance(difference.op, ast.Sub) else ()
    match difference:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="sub"), args=[x, u], keywords=[]):
            return x, u
        case ast.Call(func=ast.Attribute(value=x, attr="sub"), args=[u], keywords=[]):
            return x, u
    return ()


def _put_sides(difference: ast.expr, x: ast.expr, u: ast.expr) -> None:
    """Replace both sides of a subtraction."""
    match difference:
        case ast.BinOp():
            difference.left, difference.right = x, u
        case ast.Call(args=[_, _]):
            difference.args = [x, u]
        case ast.Call(func=ast.Attribute() as method):
            method.value, difference.args = x, [u]


def _squared(expr: ast.expr) -> ast.expr | None:
    """Return what an expression is the square of; None if it is no square.

    Example:
        >>> texts = ("d ** 2", "d.pow(2)", "torch.square(d - u)", "torch.mul(d, d)", "d * e", "d.mul(e)")
        >>> squares = [_squared(ast.parse(text, mode="eval").body) for text in texts]
        >>> [ast.unparse(square) if square else None for square in squares]
        ['d', 'd', 'd - u', 'd', None, None]
    """
    match expr:
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=2)):
            return base
        case ast.BinOp(left=ast.Name(id=left) as base, op=ast.Mult(), right=ast.Name(id=right)) if left == right:
            return base
        case ast.Call(func=ast.Attribute(attr="mul")):
            return _square_by_name(expr)
    power = _Reduction.of(expr, "pow", "square")
    match power:
        case _Reduction("pow", base, [ast.Constant(value=2)], []) | _Reduction("square", base, [], []):
            return base
    return None


def _square_by_name(call: ast.Call) -> ast.expr | None:
    """Return what a call multiplies by itself: ``d`` in ``d.mul(d)`` and ``torch.mul(d, d)``."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch")), args=[ast.Name() as base, ast.Name(id=other)]):
            return base if base.id == other else None
        case ast.Call(func=ast.Attribute(value=ast.Name() as base), args=[ast.Name(id=other)]):
            return base if base.id == other else None
    return None


def spread_out(function: ast.FunctionDef, call: ast.Call, count: float, place: int) -> ast.expr | None:
    """Return a variance, a standard deviation, or one of them with the mean, over as many channels as there were.

    Args:
        function: the function that makes the call; may be changed.
        call: the call.
        count, place: as for `divide_total`.

    Returns:
        The expression; None if the code has another form, computes the correction, or corrects for the number of
        channels times that of positions.

    Example:
        >>> function = ast.parse("def f(x): return x.std(-1)").body[0]
        >>> print(ast.unparse(spread_out(function, function.body[0].value, 8, 0)))
        x.square().sum(-1).div(8).sub(x.sum(-1).div(8).square()).mul(8 / 7).sqrt()
    """
    reduction = _Reduction.of(call, "std", "var")
    arguments = None if reduction is None else _arguments(reduction)
    if reduction is None or arguments is None:
        return None
    correction = arguments.pop("correction", ast.Constant(1))
    unbiased = arguments.pop("unbiased", correction)
    if not isinstance(unbiased, ast.Constant) or not isinstance(unbiased.value, (int, float)):
        return None
    if unbiased.value and place:
        return None
    others = [ast.keyword(name, value) for name, value in arguments.items() if name != "dim"]
    first_x, x = _named(reduction.tensor, f"_x_{call.end_lineno}_{call.end_col_offset}", may_keep=True)
    alike = _Reduction(reduction.name, x, [arguments["dim"]], others)
    squares = alike.average(_method(first_x, "square"), count, place)
    result: ast.expr = _method(squares, "sub", _method(alike.average(x, count, place), "square"))
    if unbiased.value:
        factor = ast.BinOp(ast.Constant(count), ast.Div(), ast.Constant(count - unbiased.value))
        result = _method(result, "mul", factor)
    if reduction.name.startswith("std"):
        result = _method(result, "sqrt")
    if not reduction.name.endswith("mean"):
        return result
    return ast.Tuple([result, alike.average(x, count, place)], ast.Load())


def _arguments(reduction: _Reduction) -> dict[str, ast.expr] | None:
    """Return the arguments of a variance by name; None if they are not all written out, or there is no dimension."""
    if len(reduction.args) > 3:
        return None
    arguments = dict(zip(("dim", "unbiased", "keepdim"), reduction.args, strict=False))
    for keyword in reduction.keywords:
        if keyword.arg is None or keyword.arg not in ("dim", "unbiased", "correction", "keepdim"):
            return None
        arguments[keyword.arg] = keyword.value
    return arguments if "dim" in arguments else None


def _named(expr: ast.expr, name: str, may_keep: bool) -> tuple[ast.expr, ast.Name]:
    """Return an expression that gives its value a name, and the name; a variable may keep its own."""
    if may_keep and isinstance(expr, ast.Name):
        return expr, ast.Name(expr.id, ast.Load())
    return ast.NamedExpr(ast.Name(name, ast.Store()), expr), ast.Name(name, ast.Load())


def _method(tensor: ast.expr, name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(tensor, name, ast.Load()), [*args], [])
