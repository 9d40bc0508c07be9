"""Calls of functions that code picks by a name, or is passed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from engine.flow.dynamic_calls import DynamicCalls, module_globals
from engine.source.syntax import span_of

KIND = "relu"


def direct(self: Any, x: Any, kind: str) -> Any:
    """By an argument."""
    return self.head(getattr(F, kind)(x))


def attribute(self: Any, x: Any) -> Any:
    """By an attribute."""
    return self.head(getattr(F, self.kind)(x))


def literal(self: Any, x: Any) -> Any:
    """By names that stand there."""
    for name in ("relu", "tanh"):
        x = getattr(F, name)(x)
    return getattr(F, "relu", None)(x)  # type: ignore[misc]


def variable(self: Any, x: Any, kind: str) -> Any:
    """Through a variable."""
    function = getattr(F, kind) if kind else F.relu
    return self.head(function(x))


def built(self: Any, x: Any, kind: str) -> Any:
    """A class, which is called at once."""
    return self.head(getattr(nn, kind)()(x))


def getter(self: Any, x: Any, kind: str) -> Any:
    """By what looks it up, and in a dictionary."""
    return operator.attrgetter(kind)(F)(F.__dict__[kind](vars(F)[kind](x)))


def passed(self: Any, x: Any, kind: Any) -> Any:
    """What the caller passes, called or not."""
    return self.head(kind(x), kind)


def own(self: Any, x: Any, kind: str) -> Any:
    """A part of the module, and one of a part."""
    return getattr(self, kind)(getattr(self.heads, kind)(x))


@pytest.mark.parametrize(
    ("function", "count"),
    [(direct, 1), (attribute, 1), (literal, 0), (variable, 1), (built, 2), (getter, 3), (passed, 1), (own, 0)],
)
def test_calls(function: Any, count: int) -> None:
    """As many as there are whose function is not settled."""
    picks = DynamicCalls(function.__code__, {"kind"}, lambda path: False, "self", lambda path: path == "heads")
    assert len(list(picks)) == count
    for call in picks:
        assert picks.at(span_of(call), 0) is call
        assert picks.at((None, None), call.lineno) is not None
    assert picks.at(((1, 0), (1, 1)), 1) is None


def test_an_attribute_that_nobody_sets() -> None:
    """It settles the function."""
    assert not list(DynamicCalls(attribute.__code__, (), lambda path: True, "self"))


def test_globals_of_a_file() -> None:
    """Of the Python module that is loaded from it; nothing for any other file."""
    assert module_globals(__file__)["KIND"] == KIND and not module_globals("nowhere.py")
