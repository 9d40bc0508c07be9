"""Of what type the variables in conditions are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine


class Last(nn.Module):
    """Takes the last feature of a list."""

    def forward(self, x: Any) -> Any:
        """Return it."""
        if isinstance(x, (list, tuple)):
            x = x[-1].flip(1)
        return x


class Net(nn.Module):
    """A part that asks for a type under the name that the model's argument has."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.last, self.leave, self.way = nn.Linear(3, 8), Last(), nn.Linear(8, 2), way

    def forward(self, x: Any, options: Any = None) -> Any:
        """Return scores."""
        if self.way == "early":
            x = self.last(x)
        elif self.way == "root":
            x = x[0] if isinstance(x, tuple) else x
        elif self.way == "caught":
            try:
                x = x.relu()
            except AttributeError:
                x = x[0]
        elif self.way == "asked":
            x = x.flip(0) if hasattr(x, "ragged") else x
        elif self.way == "option":
            if options is not None:
                x = x * 2
        x = self.enter(x)
        x = [x, x] if self.way == "several" else x
        return self.leave(self.last(x)) if self.way != "early" else self.leave(x)


@pytest.mark.parametrize(
    ("way", "free"),
    [
        ("plain", True),
        ("option", True),
        ("several", True),
        ("early", True),
        ("root", False),
        ("caught", False),
        ("asked", False),
    ],
)
def test_a_type_that_a_part_asks_for(way: str, free: bool) -> None:
    """It is settled unless a condition before comes out otherwise for an argument of another type."""
    graph = engine.trace(Net(way), torch.zeros(2, 3))
    kept = [how for how in graph.exits.values() if "could be read" in how]
    groups = engine.dependency_groups(Net(way), torch.zeros(2, 3), graph=graph)
    (group,) = (group for group in groups if group.name == "enter")
    assert (group.reason is None) is free, kept


class Noted(nn.Module):
    """Holds its argument, and what ops computed of it, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Tensor:
        """Return scores."""
        for layer in (self.enter, self.leave):
            if isinstance(x, list):
                x = x[0].flip(1)
            x = layer(x)
        return x  # type: ignore[no-any-return]


def test_an_argument_is_one_of_the_values() -> None:
    """What is an argument once, and computed the other time, may be of another type."""
    groups = engine.dependency_groups(Noted(), torch.zeros(2, 3))
    (group,) = (group for group in groups if group.name == "enter")
    assert "could be read" in str(group.reason)
