"""Tests of the schedules."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

from lightning_compress import ChannelPruning
from lightning_compress.selection import schedules
from lightning_compress.trainer.packages import MisconfigurationException

ALL = [
    *schedules.SCHEDULES,
    "exponential",
    "iterative",
    [0.2, 0.5, 1.0],
    {"exponential": {"rate": 0.5}},
    {"iterative": {"rounds": 3, "schedule": "cubic"}},
    {"warm_up": {"part": 0.3, "schedule": "exponential"}},
    {"cool_down": {"part": 0.3, "schedule": {"iterative": {"rounds": 2}}}},
    {"warm_up": {"part": 0.2, "schedule": {"cool_down": {"part": 0.2, "schedule": "linear"}}}},
    {"joined": {"first": "linear", "second": "cubic", "at": 0.25, "level": 0.75}},
]


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_never_falls_and_ends_at_one(spec: object) -> None:
    """A schedule grows monotonically within [0, 1] and reaches 1, whatever it is put together from."""
    schedule = schedules.resolve(spec)
    values = [schedule(t / 40) for t in range(41)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-12) and 0.0 <= values[0] and values[-1] <= 1.0


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_travels_to_other_processes(spec: object) -> None:
    """Strategies that spawn processes pickle the callbacks, and so their schedules."""
    schedule = schedules.resolve(spec)
    assert pickle.loads(pickle.dumps(schedule))(0.6) == schedule(0.6)


def test_exponential() -> None:
    """What is still to go shrinks by the same factor over equal times, but for the last bit that makes it end at 1."""
    schedule = schedules.exponential(4.0)
    left = [math.exp(-4.0), *(1 - (1 - math.exp(-4.0)) * schedule(t / 4) for t in range(4))]
    assert [b / a for a, b in itertools.pairwise(left[1:])] == pytest.approx([math.exp(-1.0)] * 3)


def test_iterative_prunes_as_often_as_it_says() -> None:
    """n rounds take n different values, the first at the start, the last at the end; one round is one shot."""
    values = [schedules.iterative(4)(t / 100) for t in range(101)]
    assert sorted(set(values)) == [0.25, 0.5, 0.75, 1.0]
    assert values[0] == 0.25 and values[-2] == 0.75
    assert schedules.iterative(1)(0.0) == 1.0


def test_warm_up_and_cool_down() -> None:
    """Nothing before, nothing more after; in between the schedule runs its whole course."""
    assert [schedules.warm_up(0.5, "one_shot")(t) for t in (0.0, 0.49, 0.5)] == [0.0, 0.0, 1.0]
    assert schedules.cool_down(0.5, "cubic")(0.25) == schedules.cubic(0.5)
    assert schedules.warm_up(0.0, "one_shot")(1e-9) == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([0.5, 0.2], "rising fractions"),
        ([], "rising fractions"),
        ([0.5, 1.5], "rising fractions"),
        ({"exponential": {"rate": 0}}, "`rate`.*got 0"),
        ({"exponential": {"speed": 1}}, "speed"),
        ({"iterative": {"rounds": 0}}, "`rounds`.*got 0"),
        ({"iterative": 3}, r"map 'iterative' to its arguments by name, as in {'iterative': {'rounds': 3}}"),
        (iter([0.5, 0.2]), "rising fractions"),
        (np.array([0.5, 0.2]), "rising fractions"),
        ({"warm_up": {"part": 1.0}}, "`part` of warm_up.*1.0"),
        ({"linear": {}}, "must name one of cool_down, exponential"),
        ({"joined": {"first": "linear", "second": "linear", "at": 1.0}}, "`at` must be in"),
    ],
)
def test_bad_specifications(spec: object, message: str) -> None:
    """Each is an error that names what is wrong."""
    with pytest.raises(MisconfigurationException, match=message):
        schedules.resolve(spec)


def test_cubic_is_agp() -> None:
    """s(t) = 1 - (1 - t)^3, so half the way prunes seven eighths."""
    assert schedules.cubic(0.0) == 0.0
    assert schedules.cubic(0.5) == 0.875


def test_resolve() -> None:
    """Names and functions resolve; an unknown name is an error that lists the known ones."""
    assert schedules.resolve("linear") is schedules.linear
    assert schedules.resolve(abs)(0.5) == 0.5
    assert schedules.resolve("lightning_compress.selection.schedules:cubic") is schedules.cubic
    with pytest.raises(MisconfigurationException, match="'cosine'.*cubic, exponential.*linear"):
        schedules.resolve("cosine")


def test_progress_is_clamped() -> None:
    """Before the start it is 0, from the end on 1, and an empty window is over at once."""
    assert schedules.progress(0, 2, 6) == 0.0
    assert schedules.progress(4, 2, 6) == 0.5
    assert schedules.progress(7, 2, 6) == 1.0
    assert schedules.progress(0, 0, 0) == 1.0
    assert schedules.progress(0, 1, 1) == 0.0


@pytest.mark.parametrize("wrong", [7, -0.5, float("nan"), None, "half"])
@pytest.mark.parametrize("late", [False, True])
def test_results_of_functions_are_checked(wrong: Any, late: bool) -> None:
    """At once where they are always wrong, and otherwise where they are used, with argument and progress."""
    at = 0.25 if late else 0.5
    message = f"The function `growth=.*returned {wrong!r} for the progress {at}"
    schedule = (lambda t: wrong if t == at else t) if late else (lambda t: wrong if t else 0.0)
    if late:
        growth = schedules.resolve(schedule, "growth")
        assert growth(0.75) == 0.75
    with pytest.raises(MisconfigurationException, match=message):
        schedules.resolve(schedule, "growth")(at)
    with pytest.raises(MisconfigurationException, match="returned None for the progress 0"):
        ChannelPruning(schedule=lambda t: None)


def test_a_function_that_fails_is_named() -> None:
    """With the argument, as the traceback alone does not say who called it."""
    with pytest.raises(MisconfigurationException, match="`growth=.*failed for the progress 0: ZeroDivisionError: "):
        schedules.resolve(lambda t: 1 / t, "growth")


def test_numbers_of_numpy() -> None:
    """They count like others, and so do arrays and iterators of them."""
    for several in (np.array([0.5, 1.0]), iter([0.5, 1.0])):
        schedule = schedules.resolve(several)  # type: ignore[arg-type]
        assert [schedule(t) for t in (0.0, 1.0)] == [0.5, 1.0]
    assert schedules.resolve([np.float32(0.5), 1])(0.0) == 0.5
    assert schedules.resolve({"iterative": {"rounds": np.int64(2)}})(0.0) == 0.5
