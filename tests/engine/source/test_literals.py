"""Which numbers of a call the source itself fixes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from engine.source.literals import unsettled

LIMIT = 4.0


def call(*numbers: Any, **named: Any) -> list[Any]:
    """Return which numbers of this call its source does not fix."""
    return unsettled([*numbers, *named.values()], sys._getframe(1))


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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code knows no positions")
def test_what_the_source_fixes() -> None:
    """Literals, globals, constructors' attributes and plain variables; no arguments, no calls, nothing conditional."""
    assert Layer().forward(9.0) == [[[], [], []], [9.0], [9.0], [2.5], [2.0]]


def test_code_without_a_source() -> None:
    """Nothing is fixed where nothing can be looked up."""
    space: dict[str, Any] = {"call": call}
    exec("found = call(1.0)", space)
    assert space["found"] == [1.0]
