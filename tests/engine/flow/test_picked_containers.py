"""Containers from which code picks items, and what they hold where it does."""

from __future__ import annotations

import ast
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.flow.picked_containers import container_of, containers_by_line, note_contents
from engine.source.syntax import nodes_of


@pytest.mark.parametrize(
    ("code", "container"),
    [
        ("y = x[k]", "x"),
        ("y = x[k] + x[j]", "x"),
        ("y = x.pop(k)", "x"),
        ("y = [x[i] for i in k]", "x"),
        ("y = f(x)[k]", None),
        ("y = x.y[k]", None),
        ("x.append(1); y = x[k]", None),
        ("y = x[k], f(x)", None),
        ("x[k] = y", None),
        ("x = y; z = x[k]", None),
        ("y = (x[i] for i in k)", None),
        ("def y(): return x[k]", None),
    ],
)
def test_a_container_as_the_line_begins(code: str, container: str | None) -> None:
    """It holds the same where the item is picked, unless the line does something else with it, or runs later."""
    tree = ast.parse(code)
    picks = [n for n in nodes_of(tree, ast.Subscript, ast.Call) if not isinstance(n, ast.Call) or "pop" in code]
    assert container_of(picks[-1], tree) == container


def test_lines_with_picks() -> None:
    """Where an item is written down, no other one is picked."""
    tree = ast.parse("a = x[0]\nb = x[k]\nc = x['k']\nd = y.get(k) + x[k:]")
    assert containers_by_line(tree) == {2: frozenset("x"), 4: frozenset("xy")}


def test_contents_are_noted_once_each() -> None:
    """By line and variable; a variable that is not set yet holds None."""

    def running(items: list[int]) -> FrameType:
        return sys._getframe()

    contents: dict[tuple[int, str], list[Any]] = {}
    frames = [running([1]), running([2]), running([1])]
    for frame in frames:
        note_contents(contents, frame, ["items", "others"], lambda held: held)
    line = frames[0].f_lineno
    assert contents == {(line, "items"): [[1], [2]], (line, "others"): [None]}


class Masks(nn.Module):
    """Multiplies by a mask over positions that a setting chooses; code beside it sets the setting."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.second, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.config = SimpleNamespace(kinds=["one", "other"])

    def weights(self, x: Tensor, h: Tensor) -> dict[str, Any]:
        """Return what may be chosen."""
        return {"one": x.mean(1, True), "other": x.amax(1, True), "none": None}

    def forward(self, x: Tensor) -> Tensor:
        """(T, 4) -> (T, 2)."""
        h = torch.relu(self.enter(x))
        weights = self.weights(x, h)
        for i in range(1):
            h = h * weights[self.config.kinds[i]]
        return self.leave(h)  # type: ignore[no-any-return]

    def choose(self, kinds: list[str]) -> None:
        """Take other items from now on."""
        self.config.kinds = kinds


class Numbers(Masks):
    """The same with numbers."""

    def weights(self, x: Tensor, h: Tensor) -> dict[str, Any]:
        """Return what may be chosen."""
        return {"one": 1.0, "other": 2.0}


class Features(Masks):
    """The same with features."""

    def weights(self, x: Tensor, h: Tensor) -> dict[str, Any]:
        """Return what may be chosen."""
        return {"one": h, "other": self.second(h)}


@pytest.mark.parametrize(("net", "free"), [(Masks, True), (Numbers, False), (Features, False)])
def test_only_what_a_container_holds_may_be_picked(net: type[nn.Module], free: bool) -> None:
    """Masks over positions keep no channels; features do, and numbers may be anything."""
    groups = engine.dependency_groups(net(), torch.randn(5, 4))
    (group,) = (group for group in groups if group.name == "enter")
    assert (group.reason is None) is free, group.reason
