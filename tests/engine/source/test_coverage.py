"""Watching what runs of a function."""

from __future__ import annotations

import ast
import sys
from types import FrameType

import pytest

from engine.source.coverage import CoverageTracer

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code keeps no columns")


def choose(flag: bool, number: int) -> int:
    """A function that decides."""
    if flag:
        number = number * 2
    return number


def both(flag: bool, number: int) -> int:
    """A function that decides by two conditions."""
    if flag and number > 1:
        number = number * 2
    return number


def _tracer() -> CoverageTracer:
    def owner(frame: FrameType) -> tuple[str, bool]:
        return "", False

    return CoverageTracer([], lambda held: held, owner)


def test_what_runs_and_what_variables_hold() -> None:
    """Instructions of all runs, and what is there where it decides and at the end."""
    tracer, before = _tracer(), sys.gettrace()
    with tracer.watching():
        choose(False, 4)
    (coverage,) = [coverage for (code, _), coverage in tracer.functions.items() if code is choose.__code__]
    assert len(list(coverage.function.untaken(coverage.ran))) == 1
    [branch] = coverage.function.branches
    assert coverage.seen[branch] == {"number": [4], "flag": [False]}
    with tracer.watching():
        choose(True, 4)
    assert not list(coverage.function.untaken(coverage.ran))
    assert coverage.seen[branch]["number"] == [4]
    assert sys.gettrace() is before


@pytest.mark.parametrize(("flag", "number", "evaluated"), [(False, 4, False), (True, 0, True)])
def test_parts_of_conditions(flag: bool, number: int, evaluated: bool) -> None:
    """The second part of a condition on one line runs only where the first one does not decide."""
    tracer = _tracer()
    with tracer.watching():
        both(flag, number)
    (coverage,) = [coverage for (code, _), coverage in tracer.functions.items() if code is both.__code__]
    function, ran = coverage.function, coverage.ran
    test = next(node.test for node in ast.walk(function.tree) if isinstance(node, ast.If))
    assert isinstance(test, ast.BoolOp)
    assert [function.evaluated(part, ran) for part in test.values] == [True, evaluated]
    assert all(function.ran(part, ran) for part in test.values)


def test_a_run_that_raises_leaves_nothing() -> None:
    """It is not a recording."""
    tracer = _tracer()
    with pytest.raises(TypeError), tracer.watching():
        choose(True, None)  # type: ignore[arg-type]
    assert not tracer.functions
