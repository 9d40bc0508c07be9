"""A branch that no recording took."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import engine

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code keeps no columns")


class Net(nn.Module):
    """Two layers, and one way for each switch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.leave, self.way = nn.Linear(3, 8), nn.Linear(8, 2), way
        self.idle = nn.Linear(8, 8)

    def beside(self, x: Tensor) -> Tensor:
        """Call what never runs."""
        result: Tensor = self.idle(x)
        return result

    def forward(self, x: Tensor, flag: bool | None = None) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        if self.way == "nothing":
            x = x[:1] if x.dtype == torch.int8 else x
        elif self.way == "idle":
            x = self.beside(x) if flag else x
        elif self.way == "check":
            assert x.shape[1] > 1 or flag
        return self.leave(x)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Two layers, and a branch that only describes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, verbose: bool | None = None) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        if verbose:
            print(x.shape, x.dtype, len(x))
        return self.leave(x)  # type: ignore[no-any-return]


def test_what_goes_to_idle_modules_stays_also_through_methods() -> None:
    """A method of the module is looked into."""
    graph = engine.trace(Net("idle"), torch.zeros(1, 3))
    assert any("could be read" in how for how in graph.exits.values())


def test_descriptions_cost_nothing() -> None:
    """Shapes, dtypes and lengths are not uses of entries."""
    graph = engine.trace(Plain(), torch.zeros(1, 3))
    assert not graph.exits and not graph.unsettled
