"""Numbers that follow from attributes which code sets later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.program.expressions import SetLater


class Stepping(nn.Module):
    """Takes more features, and more rows, the further a counter is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)
        self.step, self.start = 0, 4

    def advance(self, step: int) -> None:
        """Set the counter."""
        self.step = step

    def forward(self, x: Tensor) -> Any:
        """Return scores."""
        h = self.enter(x)
        h = torch.cat([h[:, : self.start + self.step // 100], h[:, self.start + self.step // 100 :] * 0], 1)
        return self.leave(h)


@pytest.mark.parametrize("constants", [None, ["step"]])
def test_a_counter_far_from_its_value(constants: list[str] | None) -> None:
    """All channels stay, unless the user says that the counter does."""
    graph = engine.trace(Stepping(), torch.zeros(2, 3), constants=constants)
    doubted = [number for numbers in graph.uncertain.values() for number in numbers if isinstance(number, SetLater)]
    assert (set(doubted) == {4}) == (constants is None)
    [group, *_] = engine.dependency_groups(Stepping(), torch.zeros(2, 3), graph=graph)
    assert ("takes an amount of it" in str(group.reason)) == (constants is None)
