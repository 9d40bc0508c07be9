"""Which numbers of a call the source itself fixes."""

from __future__ import annotations

import sys
from typing import Any

from engine.source.literals import unfixed_numbers
from engine.source.sizes import numbers_in

LIMIT = 4.0


def call(*numbers: Any, **named: Any) -> list[Any]:
    """Return which numbers of this call its source does not fix."""
    return unfixed_numbers(numbers_in([*numbers, *named.values()]), sys._getframe(1))


class Layer:
    """Has attributes of a constructor, and one that its forward sets."""

    size = 3

    def __init__(self) -> None:
        self.slope, self.state = 0.2, 0.3

    def forward(self, number: float) -> list[Any]:
        """Pass numbers of all kinds."""
        self.state = number
        half = 0.5
        sometimes = 1.5
        if number:
            sometimes = 2.5
        settled = [call(1.0, -2), call(LIMIT * 2, self.slope), call(half, last=self.size)]
        return [settled, call(number), call(self.state), call(sometimes), call(float("2.0"), 3.0)]


def filled(wanted: float, padding: float = 0.5, first: bool = True) -> list[list[Any]]:
    """Pass arguments on, a choice by one, and a variable with a single assignment."""
    if wanted:
        dim = 7.0 if first else 8.0
    return [call(wanted), call(padding), call(dim)]


def wrapped(*numbers: float) -> list[list[Any]]:
    """Hand a sequence on."""
    return filled(*numbers)


def test_arguments_that_the_running_call_fixes() -> None:
    """Literals and defaults are fixed; what comes from a variable is not, nor what a sequence hands on."""
    number = float("9.0")
    assert filled(2.0) == [[], [], []] and filled(2.0, 3.0, first=False) == [[], [], []]
    assert filled(number, number) == [[9.0], [9.0], []]
    assert filled(number, first=bool(number)) == [[9.0], [], [7.0]]
    assert wrapped(2.0, 3.0) == [[2.0], [3.0], [7.0]]


def test_what_the_source_fixes() -> None:
    """Literals, globals, constructors' attributes and plain variables; no arguments, no calls, nothing conditional."""
    assert Layer().forward(9.0) == [[[], [], []], [9.0], [9.0], [2.5], [2.0]]


class Shapes:
    """Puts a shape together before it is passed."""

    def __init__(self) -> None:
        self.width = 8

    def forward(self, rows: tuple[int, ...], number: int) -> list[Any]:
        """Pass tuples of fixed numbers and others."""
        columns = number + 1
        shape = (*rows, -1, self.width)
        mixed = (number, columns, 3)
        twice = (1, 2)
        if number:
            twice = (3, 4)
        number = 5
        return [call(*shape), call(shape), call(mixed), call(twice), call(*twice)]


def test_a_tuple_that_is_put_together_before() -> None:
    """What the source fixes of its elements is fixed."""
    assert Shapes().forward((7,), 9) == [[7], [7], [9, 10, 3], [3, 4], [3, 4]]


def test_code_without_a_source() -> None:
    """Nothing is fixed where nothing can be looked up."""
    space: dict[str, Any] = {"call": call}
    exec("found = call(1.0)", space)
    assert space["found"] == [1.0]
