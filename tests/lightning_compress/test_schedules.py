"""Tests of the schedules."""

from __future__ import annotations

import pytest

from lightning_compress import schedules
from lightning_compress.packages import MisconfigurationException


@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
def test_never_falls_and_ends_at_one(name: str) -> None:
    """A schedule grows monotonically within [0, 1] and reaches 1."""
    values = [schedules.SCHEDULES[name](t / 20) for t in range(21)]
    assert values == sorted(values)
    assert values[-1] == 1.0 and values[0] >= 0.0


def test_cubic_is_agp() -> None:
    """s(t) = 1 - (1 - t)^3, so half the way prunes seven eighths."""
    assert schedules.cubic(0.0) == 0.0
    assert schedules.cubic(0.5) == 0.875


def test_resolve() -> None:
    """Names and functions resolve; an unknown name is an error that lists the known ones."""
    assert schedules.resolve("linear") is schedules.linear
    assert schedules.resolve(abs) is abs
    with pytest.raises(MisconfigurationException, match="'cosine'.*cubic, linear, one_shot"):
        schedules.resolve("cosine")


def test_progress_is_clamped() -> None:
    """Before the start it is 0, from the end on 1, and an empty window is over at once."""
    assert schedules.progress(0, 2, 6) == 0.0
    assert schedules.progress(4, 2, 6) == 0.5
    assert schedules.progress(7, 2, 6) == 1.0
    assert schedules.progress(0, 0, 0) == 1.0
    assert schedules.progress(0, 1, 1) == 0.0


def test_last_position_leaves_one_epoch() -> None:
    """Pruning is done one epoch before the end; with one epoch, before it starts."""
    assert schedules.last_position(5, 1) == 4
    assert schedules.last_position(1, 1) == 0
    assert schedules.last_position(30, 10) == 20
