"""What variables hold in the rounds in which a branch does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from engine.flow.branches import Branch, FunctionBranches, branches_of
from engine.flow.rounds import Rounds, repeatable


def _select(items: list[int], wanted: int, is_last: bool) -> int:
    picked = -1
    for place, item in enumerate(items):
        if is_last:
            picked = item
        if place == wanted:
            picked = item
    return picked


def _nothing(items: list[Any]) -> Any:
    carry, other = None, None
    for item in items:
        carry = item(1) if carry is None else carry + 2
        if other is None:
            other = items.pop()
    return carry, other


def _types(layers: list[Any], x: Any, kind: type) -> Any:
    for layer in layers:
        x = layer(x)
        if isinstance(x, tuple):
            x, _ = x
        if isinstance(x, kind):
            x = x.data
    return x


def _later(new: int, old: int, limit: int) -> int:
    return new if new >= limit else old


def _branches(function: Callable[..., Any]) -> FunctionBranches:
    branches = branches_of(function.__code__)
    assert branches is not None
    return branches


def _seen(function: Callable[..., Any], *args: Any) -> dict[int, dict[str, list[Any]]]:
    """Run a function, and return the notes of the branches that may repeat, by the line of the function."""
    branches = _branches(function)
    repeated, ran = repeatable(branches, True, False), set[int]()
    seen: dict[Branch, dict[str, list[Any]]] = {}
    rounds = Rounds((), repeated, function.__globals__, ran, seen, lambda held: held)

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            ran.add(frame.f_lasti)
            rounds.step(frame.f_lasti, frame.f_lineno)
            rounds.decide(frame, branches.decided_on.get(frame.f_lineno, ()))
        elif event == "return":
            rounds.end(frame, branches.decided_late, arg)
        return step

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: step if frame.f_code is function.__code__ else None)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    first = function.__code__.co_firstlineno
    return {branch.line - first: notes for branch, notes in seen.items() if not branch.skipped}


def test_notes_are_of_the_rounds_in_which_a_branch_does_not_run() -> None:
    """What an item was in the round that picked it, is not among them."""
    notes = _seen(_select, [5, 6, 7], 1, True)
    assert notes[6]["item"] == [5, 7]
    assert 4 not in notes  # in no round


def test_calls_are_rounds() -> None:
    """Of a function that is called again."""
    notes = _seen(_later, 1, 2, 3)
    assert notes[1]["new"] == [1]


@pytest.mark.parametrize(("by_calls", "lines"), [(False, {5, 6}), (True, {3, 4, 5, 6})])
def test_which_branches_may_repeat(by_calls: bool, lines: set[int]) -> None:
    """Those in loops, of conditions that the rounds tell apart; of several calls, also by their arguments."""
    branches = repeatable(_branches(_select), by_calls, False)
    first = _select.__code__.co_firstlineno
    assert {branch.line - first for branch in branches} == lines


def test_what_is_none_before_the_first_round_alone() -> None:
    """No other call tells rounds apart by it, unless what a round assigns may be None."""
    branches = repeatable(_branches(_nothing), False, False)
    first = _nothing.__code__.co_firstlineno
    assert {branch.line - first for branch in branches} == {4, 5}


def test_what_layers_return_is_of_one_type_each() -> None:
    """A test for it is the same in each round, unless it is for a type that differs, or of what else assigned it."""
    branches = repeatable(_branches(_types), False, False)
    first = _types.__code__.co_firstlineno
    assert {branch.line - first for branch in branches} == {5, 6}
