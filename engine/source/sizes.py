"""Numbers that remember how they were computed from shapes and attributes, and note when code decides by them.

``x.view(b, c // self.groups, -1)`` passes plain integers to the op. While tracing, shapes and module attributes are
handed out as `Size`, an ``int`` that remembers its expression through arithmetic, so that an analysis can ask what
the argument *will be* once tensors are smaller, and refuse what would stay behind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from engine.program.expressions import ARITHMETIC, COMPARISONS, UNARY, Apply, Expr, Guard
from engine.source.sites import is_library

__all__ = ["LISTENING", "Scalar", "Shape", "Size", "expression", "is_tagged", "numbers_in", "tell_numbers", "truths_in"]


class Size(int):
    """An ``int`` that knows the expression it came from.

    Example:
        >>> from engine.program.expressions import AttributeOf, describe
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

    def __bool__(self) -> bool:
        _tell(Apply("!=", self.expr, 0), float(self) != 0)
        return float(self) != 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (float, (float(self),))


def expression(number: int | float) -> Expr:
    """Return the expression of a number, itself where it has none."""
    return number.expr if isinstance(number, (Size, Scalar)) else _plain(number)


def is_tagged(number: Any) -> bool:
    """Whether a number knows the expression it came from."""
    return isinstance(number, (Size, Scalar))


def _plain(number: int | float) -> int | float:
    """Return a number that remembers nothing; ``int(number)`` would ask its own ``__int__``."""
    return float.__float__(number) if isinstance(number, float) else int.__int__(number)


def _sized(result: int | float, symbol: str, left: int | float, right: int | float) -> Size | Scalar:
    expr = Apply(symbol, expression(left), expression(right))
    return Scalar(result, expr) if isinstance(result, float) else Size(result, expr)


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
        return _sized(result, symbol, left, right)

    return method


def _unary(base: type, symbol: str, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *digits: int) -> Any:
        if digits:  # of `round`
            tell_numbers([self])
            return plain(self, *digits)
        return _sized(plain(self), symbol, self, 0)

    return method


def _compared(base: type, symbol: str, name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(base, name)

    def method(self: Any, other: Any) -> Any:
        outcome = plain(self, other)
        if outcome is NotImplemented and isinstance(other, float):
            outcome = getattr(float, name)(float(self), float(other))
        if outcome is not NotImplemented:
            _tell(Apply(symbol, self.expr, expression(other)), outcome)
        return outcome

    return method


def _forgetful(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *args: Any) -> Any:
        tell_numbers([self])
        return plain(self, *args)

    return method


def tell_numbers(numbers: Iterable[Any], depth: int = 3) -> None:
    """Keep that the caller's caller goes on with numbers as they are now, in a form that remembers nothing."""
    for number in numbers:
        if isinstance(number, (Size, Scalar)):
            _tell(Apply("==", number.expr, _plain(number)), True, depth)


def _tell(expr: Apply, outcome: bool, depth: int = 2) -> None:
    """Keep a comparison that the user's code makes; torch's and the engine's own decide nothing about channels."""
    frame = sys._getframe(depth)
    if LISTENING and not is_library(frame.f_code.co_filename):
        LISTENING[-1].setdefault(expr, Guard(expr, outcome, f"{frame.f_code.co_filename}:{frame.f_lineno}"))


LISTENING: list[dict[Apply, Guard]] = []
"""Where comparisons go: what is recording last is the last."""

# Among them `hash`, for a table of sizes. Text is left out, though it could be a key too: code often prints shapes.
_FORGETFUL = """abs and bit_count bit_length divmod float hash int invert is_integer as_integer_ratio lshift or pos rand
    rdivmod rlshift ror rrshift rshift rxor xor""".split()


def _remember(kind: type, base: type) -> None:
    """Give a class of numbers the methods of a plain one, so that nothing is computed or decided unseen."""
    for symbol, name in ARITHMETIC.items():
        setattr(kind, f"__{name}__", _tagged(base, symbol, f"__{name}__", swapped=False))
        setattr(kind, f"__r{name}__", _tagged(base, symbol, f"__r{name}__", swapped=True))
    for symbol, name in COMPARISONS.items():
        setattr(kind, f"__{name}__", _compared(base, symbol, f"__{name}__"))
    for symbol in (s for s in UNARY if hasattr(base, f"__{s}__")):
        setattr(kind, f"__{symbol}__", _unary(base, symbol, f"__{symbol}__"))
    for name in (n for plain in _FORGETFUL for n in (plain, f"__{plain}__")):
        if hasattr(base, name):
            setattr(kind, name, _forgetful(base, name))


_remember(Size, int)
_remember(Scalar, float)


class Shape(tuple[int, ...]):
    """What ``x.shape`` gives while tracing: `torch.Size` drops subclasses of ``int``, a tuple keeps them."""

    def numel(self) -> int:
        """Product of the sizes."""
        return math.prod(self)

    def __getitem__(self, item: Any) -> Any:
        part = tuple.__getitem__(self, item)
        return Shape(part) if isinstance(item, slice) else part

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


def numbers_in(tree: Any) -> list[int | float]:
    """Return the numbers in nested arguments, in order."""
    numbers: list[int | float] = []
    for item in (tree,) if isinstance(tree, (int, float)) else _parts(tree):
        if type(item) in _WITHOUT_NUMBERS:
            continue
        if not isinstance(item, (int, float)):
            numbers += numbers_in(item)
        elif not isinstance(item, bool):
            numbers.append(item)
    return numbers


_WITHOUT_NUMBERS = frozenset({bool, str, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device})


def truths_in(tree: Any) -> Iterator[bool]:
    """Yield the truth values in nested arguments, in order."""
    for item in (tree,) if isinstance(tree, bool) else _parts(tree):
        if isinstance(item, bool):
            yield item
        else:
            yield from truths_in(item)
