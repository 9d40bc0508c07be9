"""Symbolic sizes: how Python code computed a number from shapes and attributes, to evaluate it for new shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.program.graph import Value
from engine.program.places import shown_place

__all__ = [
    "ARITHMETIC",
    "COMPARISONS",
    "UNARY",
    "Apply",
    "AttributeOf",
    "Expr",
    "Guard",
    "NumberOf",
    "SetLater",
    "ShapeOf",
    "describe",
    "evaluate",
    "leaves",
]


@dataclass(frozen=True)
class ShapeOf:
    """The size of a value along a dimension."""

    value: Value
    dim: int


@dataclass(frozen=True)
class AttributeOf:
    """An integer attribute of a module."""

    module: str
    name: str


@dataclass(frozen=True)
class NumberOf:
    """A float attribute of a module, with its current value."""

    module: str
    name: str
    value: float


@dataclass(frozen=True)
class Apply:
    """An arithmetic operation or comparison of expressions; a unary one such as ``sqrt`` ignores its right operand."""

    symbol: str
    left: Expr
    right: Expr


Expr = int | float | ShapeOf | AttributeOf | NumberOf | Apply


@dataclass(frozen=True)
class Guard:
    """A comparison of sizes in the user's code that determines its control flow.

    Attributes:
        expr: the comparison.
        outcome: its result during recording.
        place: file and line.
        decides: whether it determines control flow. False for a number that torch read without passing it to an op,
            like the bound of a slice that covers a whole tensor: what runs may still differ at another size.
    """

    expr: Apply
    outcome: bool
    place: str
    decides: bool = True

    def __str__(self) -> str:
        return f"{describe(self.expr)} ({shown_place(self.place)})"


class SetLater(int):
    """A number among the arguments of an op that follows from an attribute which code sets later."""


COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "/": "truediv", "**": "pow"}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    symbol: getattr(operator, name) for symbol, name in (COMPARISONS | ARITHMETIC).items()
}
_FUNCTIONS = (
    math.ceil,
    math.exp,
    math.floor,
    math.log,
    math.log10,
    math.log2,
    math.sqrt,
    math.trunc,
    operator.neg,
    round,
)
UNARY: dict[str, Callable[[Any], Any]] = {function.__name__: function for function in _FUNCTIONS}


def evaluate(expr: Expr, shape: Callable[[Value], tuple[int, ...]], attribute: Callable[[AttributeOf], int]) -> Any:
    """Return the value of an expression for new shapes and attributes: an int, or a float after ``/`` or ``**``.

    NaN where Python would raise: a division by zero, the logarithm of zero, NaN rounded to an integer.
    """
    if isinstance(expr, ShapeOf):
        return shape(expr.value)[expr.dim]
    if isinstance(expr, AttributeOf):
        return attribute(expr)
    if isinstance(expr, NumberOf):
        return expr.value
    if isinstance(expr, Apply) and expr.symbol in UNARY:
        return _defined(UNARY[expr.symbol], evaluate(expr.left, shape, attribute))
    if isinstance(expr, Apply):
        left, right = (evaluate(e, shape, attribute) for e in (expr.left, expr.right))
        return _defined(_BINARY[expr.symbol], left, right)
    return expr


def _defined(function: Callable[..., Any], *numbers: Any) -> Any:
    try:
        result = function(*numbers)
    except (ArithmeticError, ValueError):
        return math.nan
    return math.nan if isinstance(result, complex) else result


def leaves(expr: Expr) -> Iterator[ShapeOf | AttributeOf]:
    """Yield the shapes and attributes that an expression depends on."""
    if isinstance(expr, Apply):
        yield from leaves(expr.left)
        yield from leaves(expr.right)
    elif not isinstance(expr, (int, float, NumberOf)):
        yield expr


def describe(expr: Expr) -> str:
    """Return an expression as source code would write it."""
    if isinstance(expr, ShapeOf):
        return f"shape[{expr.dim}]"
    if isinstance(expr, (AttributeOf, NumberOf)):
        return f"{expr.module + '.' if expr.module else ''}{expr.name}"
    if isinstance(expr, Apply) and expr.symbol in UNARY:
        return f"{expr.symbol}({describe(expr.left)})"
    if isinstance(expr, Apply):
        return f"({describe(expr.left)} {expr.symbol} {describe(expr.right)})"
    return str(expr)
