"""Steps that a run takes."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.alternatives.steps import (
    calls_by_place,
    constants_that_differ,
    layers_behind,
    numbers_that_differ,
    steps_of,
)


class Rounds(nn.Module):
    """Runs a layer a number of times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.layer, self.rounds = nn.Linear(3, 3), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features."""
        for _ in range(self.rounds):
            x = self.layer(x).relu()
        return x


def test_a_longer_loop_takes_no_other_steps() -> None:
    """Its third round follows the second as the second follows the first."""
    two, three, one = (engine.trace(Rounds(n), torch.zeros(1, 3)).nodes for n in (2, 3, 1))
    assert steps_of(two) == steps_of(three) > steps_of(one)


def test_calls_from_one_place_are_told_by_their_number() -> None:
    """Each round is a call of its own."""
    nodes = engine.trace(Rounds(2), torch.zeros(1, 3)).nodes
    assert sorted(count for _, count in calls_by_place(nodes)) == [0, 0, 1, 1]


class Levels(nn.Module):
    """Runs layers one after the other, and returns what one of them gives."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.layers, self.level = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), level
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        levels = [x := layer(x).relu() for layer in self.layers]
        return self.head(levels[self.level])  # type: ignore[no-any-return]


def test_values_of_one_line_are_told_by_the_layers_behind() -> None:
    """To read the result of another layer is another step; sums are told by all of their layers."""
    first, last = (engine.trace(Levels(level), torch.zeros(1, 3)).nodes for level in (0, 2))
    assert steps_of(first) != steps_of(last)
    behind = layers_behind(last)
    assert behind[last[-1].inputs[0].index] == {"layers.2.weight", "layers.2.bias"}


def test_numbers_and_constants_that_differ() -> None:
    """Dimensions do not count as numbers."""
    one, other = (engine.trace(Scaled(n), torch.zeros(1, 3)).nodes[0] for n in (2, 3))
    assert [name for name, _ in numbers_that_differ(one, other)] == ["other"]
    assert not list(numbers_that_differ(one, one))
    assert not list(constants_that_differ(one, other))


class Scaled(nn.Module):
    """Multiplies by a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * float(self.number)
