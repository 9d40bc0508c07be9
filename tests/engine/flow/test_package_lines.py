"""Which lines of packages' functions ran."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from engine.flow.package_lines import PackageLines


def _choose(flag: bool) -> int:
    if flag:
        return 1
    return 2


def _lines_that_ran(*flags: bool) -> list[bool]:
    lines, first = PackageLines(), _choose.__code__.co_firstlineno
    lines.watch(_choose.__code__)

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return lines.enter(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for flag in flags:
            _choose(flag)
    finally:
        sys.settrace(before)
    return [lines.ran(_choose.__code__, first + n, first + n) for n in (1, 2, 3)]


def test_each_call_adds_the_lines_that_it_ran() -> None:
    """A line counts once any call ran it, and a span once any of its lines did."""
    assert _lines_that_ran() == [False, False, False]
    assert _lines_that_ran(True) == [True, True, False]
    assert _lines_that_ran(True, False) == [True, True, True]


def test_functions_that_are_not_watched_count_as_run() -> None:
    """So do spans without code."""
    lines, code = PackageLines(), _choose.__code__
    assert lines.ran(code, code.co_firstlineno, code.co_firstlineno + 3)
    lines.watch(code)
    assert lines.ran(code, 10**6, 10**6)
