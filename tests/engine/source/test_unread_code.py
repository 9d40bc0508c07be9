"""What the instructions of a function say whose text is gone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from engine.source.unread_code import UnreadFunction, chooses_by_value, condition_at, conditional_jumps, has_sizes


def function_of(text: str) -> Callable[..., Any]:
    """A function compiled from text that no file holds."""
    space: dict[str, Any] = {"FLAG": True, "SIZE": 3, "TABLE": {}}
    exec(f"def f(self, x, flag=True, *, mask=None):\n{text}", space)
    function: Callable[..., Any] = space["f"]
    return function


def one_way(text: str, *calls: tuple[Any, ...]) -> int:
    """The number of jumps of which calls saw one way only."""
    function = function_of(text)
    unread = UnreadFunction(function.__code__, "", function.__globals__)

    def trace(frame: Any, event: str, arg: Any) -> Any:
        return unread.tracer(frame) if frame.f_code is function.__code__ else None

    for call in calls:
        prior = sys.gettrace()
        sys.settrace(trace)
        try:
            function(*call)
        finally:
            sys.settrace(prior)
    return len(list(unread.one_way()))


@pytest.mark.parametrize(
    ("text", "calls", "count"),
    [
        (" return x + 1", [(0, 1)], 0),
        (" return x if flag else -x", [(0, 1)], 1),
        (" return x if flag else -x", [(0, 1), (0, 1, False)], 0),
        (" if flag: x = -x\n return x", [(0, 1)], 1),
        (" if flag: x = -x\n return x", [(0, 1, False)], 1),
        (" if not flag: raise ValueError(f'{x} {flag}')\n return x", [(0, 1)], 0),
        (" assert x > 0, x\n return x", [(0, 1)], 0),
        (" for i in range(3): x += i\n return x", [(0, 1)], 0),
        (" for i in range(3): return i", [(0, 1)], 1),
        (" for i in self: x += i\n return x", [((), 1)], 1),
        (" return x if flag and mask is None else -x", [(0, 1)], 2),
        (" while x < 3: x += 1\n return x", [(0, 1), (0, 3)], 0),
    ],
)
def test_ways_of_jumps(text: str, calls: list[tuple[Any, ...]], count: int) -> None:
    """A side that only raises is none."""
    assert one_way(text, *calls) == count


@pytest.mark.parametrize(
    ("test", "read"),
    [
        ("self.gate is None", "self.gate is None"),
        ("self.gate is not None", "self.gate is None"),
        ("not self.part.flag", "self.part.flag"),
        ("self.kind == 'a'", "self.kind == 'a'"),
        ("self.size > 3", "self.size > 3"),
        ("self.kind in ('a', 'b')", "self.kind in ('a', 'b')"),
        ("hasattr(self, 'gate')", "hasattr(self, 'gate')"),
        ("isinstance(mask, (list, tuple))", "isinstance(mask, (list, tuple))"),
        ("len(self.layers) > 1", "len(self.layers) > 1"),
        ("y > 1", None),
        ("x", None),
        ("self.gate + 1 > 2", None),
    ],
)
def test_conditions_are_read(test: str, read: str | None) -> None:
    """Those of attributes, arguments that are not assigned, globals and constants."""
    code = function_of(f" y = x\n x = 2\n if {test}: y = 1\n return y").__code__
    [jump] = conditional_jumps(code)
    expression = condition_at(code, jump)
    assert (None if expression is None else ast.unparse(expression)) == read
    assert expression is None or expression.lineno == 4


@pytest.mark.parametrize(
    ("text", "chooses"),
    [
        (" return x[:, 0, None]", False),
        (" return x[0]", False),
        (" return x[1:3]", False),
        (" return x.view(SIZE)", False),
        (" return [y for y in x]", False),
        (" return x[mask]", True),
        (" return x * FLAG", True),
        (" return TABLE", True),
        (" return getattr(x, 'size')", True),
        (" return x.get(mask)", True),
        (" return next(x)", True),
    ],
)
def test_what_is_chosen_by_a_value(text: str, chooses: bool) -> None:
    """Items by what is no constant, names, flags and containers of the file."""
    function = function_of(text)
    assert chooses_by_value(function.__code__, function.__globals__) is chooses


def test_a_variable_of_an_enclosing_function() -> None:
    """A function that assigns it does something else in the next call; one that reads it does not."""
    outer = function_of(
        " n = 0\n def g():\n  nonlocal n\n  n += 1\n  return n\n def h(): return n\n return g, h"
    ).__code__
    inner = [constant for constant in outer.co_consts if isinstance(constant, CodeType)]
    assert [chooses_by_value(code, {}) for code in inner] == [True, False]


def test_whole_numbers_that_may_be_sizes() -> None:
    """Also in tuples; flags and axes are none."""
    assert has_sizes(function_of(" return x.view((2, 8))").__code__)
    assert not has_sizes(function_of(" return x.sum(1, True)").__code__)
