"""Sizes written in Python code: where each number among the arguments of an op came from.

``x.view(b, c // self.groups, -1)`` passes plain integers to the op. While tracing, shapes and module attributes are
handed out as `Size`, an ``int`` that remembers its expression through arithmetic, so that an analysis can ask what
the argument *will be* once tensors are smaller, and refuse what would stay behind.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.graph import Value

__all__ = [
    "Apply",
    "AttributeOf",
    "Expr",
    "Guard",
    "Provenance",
    "Scalar",
    "ShapeOf",
    "Site",
    "Size",
    "describe",
    "evaluate",
    "leaves",
    "numbers_in",
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
class Apply:
    """An arithmetic operation on expressions, or a comparison; ``sqrt`` has nothing on its right."""

    symbol: str
    left: Expr
    right: Expr


Expr = int | float | ShapeOf | AttributeOf | Apply


@dataclass(frozen=True)
class Guard:
    """A comparison of sizes in the user's code, which decides how it goes on.

    Attributes:
        expr: what is compared.
        outcome: what came out.
        place: file and line.
    """

    expr: Apply
    outcome: bool
    place: str

    def __str__(self) -> str:
        return f"{describe(self.expr)} ({self.place})"


_COMPARISONS: dict[str, str] = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "/": operator.truediv,
    "**": operator.pow,
    "sqrt": lambda left, right: math.sqrt(left),
} | {symbol: getattr(operator, name) for symbol, name in _COMPARISONS.items()}


def evaluate(expr: Expr, shape: Callable[[Value], tuple[int, ...]], attribute: Callable[[AttributeOf], int]) -> Any:
    """Return the value of an expression under new shapes and attributes: an int, or a float after ``/`` or ``**``."""
    if isinstance(expr, ShapeOf):
        return shape(expr.value)[expr.dim]
    if isinstance(expr, AttributeOf):
        return attribute(expr)
    if isinstance(expr, Apply):
        left, right = (evaluate(e, shape, attribute) for e in (expr.left, expr.right))
        return _ARITHMETIC[expr.symbol](left, right)
    return expr


def leaves(expr: Expr) -> Iterator[ShapeOf | AttributeOf]:
    """Yield the shapes and attributes that an expression depends on."""
    if isinstance(expr, Apply):
        yield from leaves(expr.left)
        yield from leaves(expr.right)
    elif not isinstance(expr, (int, float)):
        yield expr


def describe(expr: Expr) -> str:
    """Return an expression as a reader would write it."""
    if isinstance(expr, ShapeOf):
        return f"shape[{expr.dim}]"
    if isinstance(expr, AttributeOf):
        return f"{expr.module + '.' if expr.module else ''}{expr.name}"
    if isinstance(expr, Apply) and expr.symbol == "sqrt":
        return f"sqrt({describe(expr.left)})"
    if isinstance(expr, Apply):
        return f"({describe(expr.left)} {expr.symbol} {describe(expr.right)})"
    return str(expr)


class Size(int):
    """An ``int`` that knows the expression it came from.

    Example:
        >>> heads = Size(4, AttributeOf("attention", "num_heads"))
        >>> describe((heads * 16).expr), heads * 16
        ('(attention.num_heads * 16)', 64)
    """

    expr: Expr
    reflected: bool = False  # whether it stands on the left of an operator that the tensor on its right carries out

    def __new__(cls, value: int, expr: Expr) -> Size:
        """Return ``value`` with its expression."""
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __bool__(self) -> bool:
        _tell(Apply("!=", self.expr, 0), int(self) != 0)
        return int(self) != 0

    def __reduce__(self) -> tuple[Any, ...]:  # a copy or a pickle of it is a plain int
        return (int, (int(self),))


class Scalar(float):
    """A ``float`` computed from sizes (``head_dim ** -0.5``) that knows the expression it came from."""

    expr: Expr
    reflected: bool = False

    def __new__(cls, value: float, expr: Expr) -> Scalar:
        """Return ``value`` with its expression."""
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (float, (float(self),))


def _expr(number: int | float) -> Expr:
    if isinstance(number, (Size, Scalar)):
        return number.expr
    return float(number) if isinstance(number, float) else int(number)


def _tagged(base: type, symbol: str, name: str, swapped: bool) -> Callable[[Any, Any], Any]:
    plain = getattr(base, name)

    def method(self: Any, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, float):  # Python would ask the float, which knows nothing
            result = getattr(float, name)(float(self), float(other))
        if result is NotImplemented:
            self.reflected = not swapped
            return result
        left, right = (other, self) if swapped else (self, other)
        kind = Scalar if isinstance(result, float) else Size
        return kind(result, Apply(symbol, _expr(left), _expr(right)))

    return method


_OPERATORS = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "/": "truediv", "**": "pow"}
for _symbol, _name in _OPERATORS.items():
    for _class, _base in ((Size, int), (Scalar, float)):
        setattr(_class, f"__{_name}__", _tagged(_base, _symbol, f"__{_name}__", swapped=False))
        setattr(_class, f"__r{_name}__", _tagged(_base, _symbol, f"__r{_name}__", swapped=True))


def _compared(symbol: str, name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(int, name)

    def method(self: Size, other: Any) -> Any:
        outcome = plain(self, other)
        if outcome is NotImplemented and isinstance(other, float):
            outcome = getattr(float, name)(float(self), float(other))
        if outcome is not NotImplemented:
            _tell(Apply(symbol, self.expr, _expr(other)), outcome)
        return outcome

    return method


for _symbol, _name in _COMPARISONS.items():
    setattr(Size, f"__{_name}__", _compared(_symbol, f"__{_name}__"))


def _tell(expr: Apply, outcome: bool) -> None:
    """Keep a comparison that the user's code makes; torch's and the engine's own decide nothing about channels."""
    frame = sys._getframe(2)
    if _LISTENING and not _is_library(frame.f_code.co_filename):
        _LISTENING[-1].setdefault(expr, Guard(expr, outcome, f"{frame.f_code.co_filename}:{frame.f_lineno}"))


_LISTENING: list[dict[Apply, Guard]] = []


class Shape(tuple[int, ...]):
    """What ``x.shape`` gives while tracing: `torch.Size` drops subclasses of ``int``, a tuple keeps them."""

    def numel(self) -> int:
        """Product of the sizes."""
        return math.prod(self)

    def __getitem__(self, item: Any) -> Any:
        found = tuple.__getitem__(self, item)
        return Shape(found) if isinstance(item, slice) else found

    def __add__(self, other: Any) -> Shape:
        return Shape(tuple.__add__(self, tuple(other)))

    def __radd__(self, other: Any) -> Shape:
        return Shape(tuple(other)) + self


def _parts(tree: Any) -> Iterable[Any]:
    """Return what an argument consists of; nothing for what holds nothing."""
    if isinstance(tree, slice):
        return tree.start, tree.stop, tree.step
    if isinstance(tree, dict):
        return tree.values()
    return tree if isinstance(tree, (list, tuple)) else ()


def numbers_in(tree: Any) -> Iterator[int | float]:
    """Yield the numbers in nested arguments, in order."""
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield tree
    for item in _parts(tree):
        yield from numbers_in(item)


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_ENGINE = frozenset(os.path.join(os.path.dirname(os.path.abspath(__file__)), f) for f in ("sizes.py", "recorder.py"))


@dataclass(frozen=True)
class Site:
    """A call in the user's code.

    Attributes:
        function: name of the torch function that is called.
        code: the code object that calls it.
        caller: the code object that called that one.
        line: line of the call, as a reader counts.
        end: last line and column of the call in the source; None before Python 3.11, which does not keep it.
        reflected: whether it is an operator with a number on its left.
    """

    function: str
    code: CodeType
    caller: CodeType | None
    line: int
    end: tuple[int, int] | None
    reflected: bool = False

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}"


@functools.cache
def _ends(code: CodeType) -> list[tuple[int, int] | None]:
    """End line and column of each instruction."""
    if not hasattr(code, "co_positions"):
        return []
    return [None if end is None or column is None else (end, column) for _, end, _, column in code.co_positions()]


def _is_library(filename: str) -> bool:
    return filename.startswith(_TORCH) or filename in _ENGINE


def user_site(function: str, reflected: bool = False) -> Site:
    """Return the innermost call outside of torch and the engine."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    ends = _ends(frame.f_code)
    place = frame.f_lasti // 2
    caller = None if frame.f_back is None else frame.f_back.f_code
    end = ends[place] if place < len(ends) else None
    return Site(function, frame.f_code, caller, frame.f_lineno, end, reflected)


def _take_reflected(numbers: Iterable[int | float]) -> bool:
    """Return whether one of the numbers called the tensor from the left, and forget it."""
    found = [n for n in numbers if isinstance(n, (Size, Scalar)) and n.reflected]
    for number in found:
        number.reflected = False
    return bool(found)


@functools.wraps(math.sqrt)
def _root(number: Any, /) -> float:
    root = _sqrt(number)
    return Scalar(root, Apply("sqrt", number.expr, 0)) if isinstance(number, (Size, Scalar)) else root


_sqrt = math.sqrt


class Provenance(TorchFunctionMode):
    """Hands out tagged shapes, and keeps the integers and the source line of the torch function that is running.

    Comparisons of sizes are kept as guards.

    ``math.sqrt`` would drop what a number remembers, so it is replaced while the mode is active.

    Args:
        value_of: gives the recorded value of a tensor, or None where the tensor is not part of the program.
    """

    _plain: ClassVar[frozenset[str]] = frozenset({"__get__", "size", "numel"})

    def __init__(self, value_of: Callable[[Tensor], Value | None]) -> None:
        super().__init__()
        self._value_of = value_of
        self.numbers: list[int | float] = []
        self.site: Site | None = None
        self.guards: dict[Apply, Guard] = {}

    def __enter__(self) -> Provenance:
        math.sqrt = _root
        _LISTENING.append(self.guards)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        math.sqrt = _sqrt
        _LISTENING.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; tag the result where it is a shape."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in self._plain:
            self.numbers = list(numbers_in((args, kwargs)))
            self.site = user_site(name, _take_reflected(self.numbers))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Size):
            return self._tag(args[0], result)
        if name == "numel":
            return self._tag(args[0], args[0].size()).numel()
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return self._tag(args[0], args[0].size())[dim]
        return result

    def _tag(self, tensor: Tensor, sizes: torch.Size) -> Shape:
        value = self._value_of(tensor)
        if value is None:
            return Shape(sizes)
        return Shape(Size(n, ShapeOf(value, d)) for d, n in enumerate(sizes))

    @property
    def tagged(self) -> bool:
        """Whether any of the running function's numbers came from a shape or an attribute."""
        return any(isinstance(n, (Size, Scalar)) for n in self.numbers)

    def match(self, number: int | float) -> Expr:
        """Return the expression of a number that reached the op, and forget it and what came before it."""
        for position, candidate in enumerate(self.numbers):
            if candidate == number:
                del self.numbers[: position + 1]
                return _expr(candidate)
        return number
