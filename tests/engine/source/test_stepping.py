"""Watching what runs of a function."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from engine.source.stepping import Steps

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code keeps no columns")


def choose(flag: bool, number: int) -> int:
    """A function that decides."""
    if flag:
        number = number * 2
    return number


def _steps() -> Steps:
    def owner(frame: FrameType) -> tuple[str, bool]:
        return "", False

    return Steps([], lambda held: held, owner)


def test_what_runs_and_what_variables_hold() -> None:
    """Instructions of all runs, and what is there where it decides and at the end."""
    steps, before = _steps(), sys.gettrace()
    with steps.watching():
        choose(False, 4)
    (course,) = [course for (code, _), course in steps.courses.items() if code is choose.__code__]
    assert len(list(course.function.missed(course.ran))) == 1
    [part] = course.function.parts
    assert course.seen[part] == {"number": [4]}
    with steps.watching():
        choose(True, 4)
    assert not list(course.function.missed(course.ran))
    assert course.seen[part]["number"] == [4]
    assert sys.gettrace() is before


def test_a_run_that_raises_leaves_nothing() -> None:
    """It is not a recording."""
    steps = _steps()
    with pytest.raises(TypeError), steps.watching():
        choose(True, None)  # type: ignore[arg-type]
    assert not steps.courses
