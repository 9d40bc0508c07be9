"""Watching what runs of a function."""

from __future__ import annotations

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
    assert coverage.seen[branch] == {"number": [4]}
    with tracer.watching():
        choose(True, 4)
    assert not list(coverage.function.untaken(coverage.ran))
    assert coverage.seen[branch]["number"] == [4]
    assert sys.gettrace() is before


def test_a_run_that_raises_leaves_nothing() -> None:
    """It is not a recording."""
    tracer = _tracer()
    with pytest.raises(TypeError), tracer.watching():
        choose(True, None)  # type: ignore[arg-type]
    assert not tracer.functions
