"""What takes the place of arguments that a call leaves out."""

from __future__ import annotations

from typing import Any

from engine.source.branches import branching
from engine.source.omitted import stand_ins


def _cell(x: Any, h: Any = None, *, gate: Any = None) -> Any:
    state = x * 0 if h is None else h
    if gate is None:
        gate = 1
    other = x + 1
    x = x + h if h is not None else x
    return state, gate, other


def test_variables_and_arguments() -> None:
    """The argument itself, and variables that are made of it; other arguments and variables are not."""
    function = branching(_cell.__code__)
    assert function is not None
    assert stand_ins(function, {"x": 1, "h": None, "gate": None}) == {"h": "h", "gate": "gate", "state": "h"}
    assert stand_ins(function, {"x": 1, "h": 2, "gate": None}) == {"gate": "gate"}


def test_a_call_with_all_arguments() -> None:
    """Nothing is left out."""
    function = branching(_cell.__code__)
    assert function is not None and stand_ins(function, {"x": 1, "h": 2, "gate": 3}) == {}
