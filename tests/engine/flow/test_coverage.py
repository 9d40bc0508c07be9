"""Watching what runs of a function."""

from __future__ import annotations

import ast
import sys
from types import FrameType

import pytest

from engine.flow.coverage import CoverageTracer


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


def rounds(numbers: tuple[int, ...]) -> int:
    """A function that decides in a loop."""
    total = 0
    for number in numbers:
        if number > 0:
            total = total + number
    return total


def rounds_on_a_line(numbers: tuple[int, ...]) -> int:
    """The same on one line."""
    total = 0
    for number in numbers:
        if number > 0: total = total + number  # fmt: skip  # noqa: E701
    return total


def _tracer() -> CoverageTracer:
    def owner(frame: FrameType) -> tuple[str, bool]:
        return "", False

    return CoverageTracer([], lambda held: held, lambda held: held, owner)


def test_what_runs_and_what_variables_hold() -> None:
    """Instructions of all runs, and what is there where it decides and at the end."""
    tracer, before = _tracer(), sys.gettrace()
    with tracer.watching():
        choose(False, 4)
    (coverage,) = [coverage for (code, _), coverage in tracer.functions.items() if code is choose.__code__]
    assert len(list(coverage.function.untaken(coverage.ran))) == 1
    branch, other = sorted(coverage.function.branches, key=lambda b: bool(b.skipped))
    assert coverage.seen[branch] == {"number": [4], "flag": [False]} and other not in coverage.pending()
    with tracer.watching():
        choose(True, 4)
    assert not list(coverage.function.untaken(coverage.ran))
    assert coverage.seen[branch]["number"] == [4]
    assert sys.gettrace() is before


def test_conditions_without_an_else() -> None:
    """Their other side runs where they are false once; until then, variables hold what they did before and behind."""
    tracer = _tracer()
    key = (choose.__code__, "")
    for flag, pending in ((True, 1), (False, 0), (True, 0)):
        with tracer.watching():
            choose(flag, 4)
        coverage = tracer.functions[key]
        others = [branch for branch in coverage.function.branches if branch.skipped]
        assert len(others) == 1 and len([b for b in others if b in coverage.pending()]) == pending
        if pending:
            assert coverage.seen[others[0]]["number"] == [4, 8]


def test_a_condition_in_a_loop_is_false_in_some_rounds() -> None:
    """On a line of its own, or with what it decides."""
    for function, numbers in ((rounds, (1, 2)), (rounds_on_a_line, (1, 2))):
        tracer = _tracer()
        for few, pending in ((numbers, 1), ((*numbers, -1), 0)):
            with tracer.watching():
                function(few)
            coverage = tracer.functions[function.__code__, ""]
            assert len([b for b in coverage.pending() if b.skipped]) == pending


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
