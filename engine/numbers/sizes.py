"""Numbers that know how they were computed from shapes and attributes, and note comparisons in the user's code.

``x.view(b, c // self.groups, -1)`` passes plain integers to the op. While a model is traced, sizes of shapes and
attributes of modules are `Size` objects: an ``int`` that carries its expression through arithmetic. An analysis can
then evaluate the argument for smaller tensors, and refuse a removal after which it would be wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from engine.numbers.table_keys import Lookups
from engine.program.expressions import ARITHMETIC, COMPARISONS, UNARY, Apply, AttributeOf, Expr, ShapeOf, leaves
from engine.source.sites import LAYERS, is_library

__all__ = [
    "LOOKUPS",
    "RECORDINGS",
    "Recording",
    "Scalar",
    "Shape",
    "Size",
    "booleans_in",
    "expression",
    "is_tagged",
    "numbers_in",
    "note_exact_values",
    "take_reflected",
    "untracked",
]


class Size(int):
    """An ``int`` that knows the expression it came from.

    Example:
        >>> from engine.program.expressions import AttributeOf, describe
        >>> heads = Size(4, AttributeOf("attention", "num_heads"))
        >>> describe((heads * 16).expr), heads * 16
        ('(attention.num_heads * 16)', 64)
    """

    expr: Expr
    reflected: bool = False  # whether it is the left operand of an operator that the tensor on the right implements

    def __new__(cls, value: int, expr: Expr | None = None) -> Any:
        """Return ``value`` with its expression; a plain number without (``type(n)(2 * n)``)."""
        if expr is None:
            return int(value)
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __bool__(self) -> bool:
        return _decided(Apply("!=", self.expr, 0), int(self) != 0)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy or a pickle of it is a plain int
        return (int, (int(self),))


class Scalar(float):
    """A ``float`` computed from sizes (``head_dim ** -0.5``) that knows the expression it came from."""

    expr: Expr
    reflected: bool = False

    def __new__(cls, value: float, expr: Expr | None = None) -> Any:
        """Return ``value`` with its expression; a plain number without."""
        if expr is None:
            return float(value)
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __bool__(self) -> bool:
        return _decided(Apply("!=", self.expr, 0), float(self) != 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return (float, (float(self),))


def expression(number: int | float) -> Expr:
    """Return the expression of a number; of a plain number, the number itself."""
    return number.expr if isinstance(number, (Size, Scalar)) else untracked(number)


def is_tagged(number: Any) -> bool:
    """Whether a number carries an expression."""
    return isinstance(number, (Size, Scalar))


def untracked(number: Any) -> Any:
    """Return a number without its expression; ``int(number)`` would call the tracked ``__int__``."""
    if not is_tagged(number):
        return number
    return float.__float__(number) if isinstance(number, float) else int.__int__(number)


def _tagged_result(result: int | float, symbol: str, left: int | float, right: int | float) -> Size | Scalar:
    expr = Apply(symbol, expression(left), expression(right))
    return Scalar(result, expr) if isinstance(result, float) else Size(result, expr)


def _arithmetic(base: type, symbol: str, name: str, swapped: bool) -> Callable[[Any, Any], Any]:
    plain = getattr(base, name)

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:  # of `pow`
            note_exact_values([self, other, *modulus])
            return plain(self, other, *modulus)
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, float):  # Python would call the untracked float's method
            result = getattr(float, name)(float(self), float(other))
        if result is NotImplemented:
            self.reflected = not swapped
            return result
        left, right = (other, self) if swapped else (self, other)
        return _tagged_result(result, symbol, left, right)

    return method


def _unary(base: type, symbol: str, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *digits: int) -> Any:
        if digits:  # of `round`
            note_exact_values([self])
            return plain(self, *digits)
        return _tagged_result(plain(self), symbol, self, 0)

    return method


def _comparison(base: type, symbol: str, name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(base, name)

    def method(self: Any, other: Any) -> Any:
        outcome = plain(self, other)
        if outcome is NotImplemented and isinstance(other, float):
            outcome = getattr(float, name)(float(self), float(other))
        if outcome is NotImplemented:
            return outcome
        return _decided(Apply(symbol, self.expr, expression(other)), outcome)

    return method


def _untracked(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *args: Any) -> Any:
        note_exact_values([self])
        return plain(self, *args)

    return method


def _hashed(base: type) -> Callable[[Any], int]:
    """Return a ``__hash__`` that notes how the number compares with the keys of tables in the running code."""
    plain: Any = base.__hash__

    def method(self: Any) -> int:
        note_exact_values([self])
        place = _place(1)
        if place is not None and isinstance(self, Size):
            size = int.__int__(self)
            for key, agree in sorted(LOOKUPS.keys(sys._getframe(1), size)):
                # the keys of a table are compared on one line, and each is a decision of its own
                left = Apply("-", self.expr, key)
                left = Apply("-", left, agree) if agree else left
                RECORDINGS[-1].note(Apply("==", left, -agree), size == key, place)
        return plain(self)

    return method


class Recording(Protocol):
    """Receives the comparisons in the user's code."""

    def note(self, expr: Apply, outcome: bool, place: str) -> None:
        """Note the outcome of a comparison at a file and line."""

    def decide(self, expr: Apply, outcome: bool, place: str) -> bool:
        """Note a comparison, and return the outcome that the code is given."""


def _place(depth: int) -> str | None:
    """Return the file and line of a comparison; None in torch and the engine, where it does not concern channels."""
    frame = sys._getframe(depth + 1)
    if not RECORDINGS or is_library(frame.f_code.co_filename):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _decided(expr: Apply, outcome: bool) -> bool:
    place = _place(2)
    if place is not None:
        return RECORDINGS[-1].decide(expr, outcome, place)
    code = sys._getframe(2).f_code
    if RECORDINGS and code.co_filename.startswith(LAYERS) and {ShapeOf, AttributeOf} <= set(map(type, leaves(expr))):
        RECORDINGS[-1].note(expr, outcome, f"{code.co_filename}:{code.co_firstlineno}")  # a layer rejects another width
    return outcome


def note_exact_values(numbers: Iterable[Any]) -> None:
    """Note that the caller's caller uses the current values of numbers in an untracked form."""
    place = _place(2)
    if place is None:
        return
    for number in numbers:
        if isinstance(number, (Size, Scalar)):
            RECORDINGS[-1].note(Apply("==", number.expr, untracked(number)), True, place)


LOOKUPS = Lookups()
"""The sizes that the running code hashes, as when it looks them up in tables."""

RECORDINGS: list[Recording] = []
"""The running recordings; the last one is in use."""

# `str` is not among them: code often prints shapes.
_UNTRACKED = """abs and bit_count bit_length divmod float int invert is_integer as_integer_ratio lshift or pos rand
    rdivmod rlshift ror rrshift rshift rxor xor""".split()


def _track(kind: type, base: type) -> None:
    """Give a class of numbers tracked versions of the methods of a plain one."""
    for symbol, name in ARITHMETIC.items():
        setattr(kind, f"__{name}__", _arithmetic(base, symbol, f"__{name}__", swapped=False))
        setattr(kind, f"__r{name}__", _arithmetic(base, symbol, f"__r{name}__", swapped=True))
    for symbol, name in COMPARISONS.items():
        setattr(kind, f"__{name}__", _comparison(base, symbol, f"__{name}__"))
    for symbol in (s for s in UNARY if hasattr(base, f"__{s}__")):
        setattr(kind, f"__{symbol}__", _unary(base, symbol, f"__{symbol}__"))
    for name in (n for plain in _UNTRACKED for n in (plain, f"__{plain}__")):
        if hasattr(base, name):
            setattr(kind, name, _untracked(base, name))
    kind.__hash__ = _hashed(base)  # type: ignore[assignment]


_track(Size, int)
_track(Scalar, float)


class Shape(tuple[int, ...]):
    """The value of ``x.shape`` while tracing: `torch.Size` would drop subclasses of ``int``, a tuple keeps them."""

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
    """Return the items of a container or a slice, and nothing for other arguments."""
    if isinstance(tree, (tuple, list)):
        return tree
    if isinstance(tree, slice):
        return tree.start, tree.stop, tree.step
    return tree.values() if isinstance(tree, dict) else ()


def numbers_in(tree: Any) -> list[int | float]:
    """Return the numbers in nested arguments, in order."""
    numbers: list[int | float] = []
    for item in (tree,) if isinstance(tree, (int, float)) else _parts(tree):
        kind = type(item)
        if kind in _WITHOUT_NUMBERS:
            continue
        if kind is int or kind is float or isinstance(item, (int, float)):
            numbers.append(item)
        elif not isinstance(item, torch.Tensor):
            numbers += numbers_in(item)
    return numbers


_LEAVES = frozenset({str, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device})
_WITHOUT_NUMBERS = _LEAVES | {bool}
_WITHOUT_BOOLEANS = _LEAVES | {int, float}


def booleans_in(tree: Any) -> list[bool]:
    """Return the booleans in nested arguments, in order."""
    booleans: list[bool] = []
    for item in (tree,) if isinstance(tree, bool) else _parts(tree):
        kind = type(item)
        if kind is bool:
            booleans.append(item)
        elif kind not in _WITHOUT_BOOLEANS:
            booleans += booleans_in(item)
    return booleans


def take_reflected(numbers: Iterable[int | float]) -> bool:
    """Return whether a number is the left operand of a reflected operator, and reset the mark."""
    reflected = [n for n in numbers if isinstance(n, (Size, Scalar)) and n.reflected]
    for number in reflected:
        number.reflected = False
    return bool(reflected)
