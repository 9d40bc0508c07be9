"""Steps that a run takes."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.alternatives.steps import calls_by_place, steps_of


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
