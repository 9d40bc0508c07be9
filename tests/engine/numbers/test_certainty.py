"""Numbers that are fixed in one run and not in another."""

from __future__ import annotations

from engine.numbers.certainty import Certainty


def test_a_number_that_was_fixed_before() -> None:
    """Only the first run that passes another one at a place is news, and only where a run before passed a fixed one."""
    certainty = Certainty()
    lost = []
    for run in ({"a": True, "b": False}, {"a": True, "b": False}, {"a": False}, {"a": False}, {"c": False}):
        certainty.start()
        for place, is_fixed in run.items():
            certainty.note(place, is_fixed)
        lost.append(certainty.is_lost)
    assert lost == [False, False, True, False, False]


def test_both_in_one_run() -> None:
    """Two callers in one run."""
    certainty = Certainty()
    certainty.start()
    certainty.note("a", True)
    certainty.note("a", False)
    assert certainty.is_lost
