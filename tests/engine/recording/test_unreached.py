"""What code that did not run could touch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code keeps no columns")
PLACE = "tests/engine/recording/test_unreached.py"


class Net(nn.Module):
    """A network with branches that the example does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.side = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def score(self, x: Tensor) -> Tensor:
        """Return the side's output."""
        result: Tensor = self.side(self.enter(x))
        return result

    def forward(self, x: Tensor, features: bool = False, scale: float | None = None) -> Any:
        """Return scores, or features."""
        x = self.enter(x)
        if scale is not None:
            x = x * scale
        if features:
            return x
        return self.leave(x)


def test_what_it_could_read_stays_and_is_named() -> None:
    """Values are outputs, or vary; the notes name the code, modules and methods."""
    graph = engine.trace(Net(), torch.zeros(1, 3))
    assert [how for how in graph.exits.values() if "could be read" in how and f"{PLACE}:" in how]
    assert list(graph.unsettled.values()) == [True]
    notes = "\n".join(graph.notes)
    assert "stay whole: side" in notes and "Net.score" in notes and f"{PLACE}:" in notes and __file__ not in notes


def test_a_network_without_branches() -> None:
    """There is nothing to say."""
    graph = engine.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    assert not graph.notes and not graph.exits and not graph.unsettled
