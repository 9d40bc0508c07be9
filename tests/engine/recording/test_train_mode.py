"""Modules without parts are run alone, and only what draws on single entries is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine


class Alone(nn.Module):
    """Does something while training.

    Args:
        what: what it does.
    """

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or what is done to it."""
        return self.what(x) if self.training else x


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "samples dropped": lambda x: x * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.5),
    "all dropped": lambda x: x * torch.empty(1, 1, 1).bernoulli_(0.5),
    "entries dropped": lambda x: nn.functional.dropout(x, 0.5),
}
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum over channels": lambda x: x - x.mean(1, keepdim=True),
    "as many numbers as channels": lambda x: x * torch.rand(3, 1, 1),
    "other places": lambda x: x.flip(1),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHER])
def test_what_draws_on_single_entries_is_left_out(name: str) -> None:
    """Anything else is recorded in train mode."""
    what = PLAIN.get(name) or OTHER[name]
    graph = engine.trace(nn.Sequential(nn.Conv2d(3, 3, 1), Alone(what)), torch.zeros(2, 3, 4, 4))
    assert any(node.path == "train" for node in graph.nodes) == (name in OTHER)


class Nested(nn.Module):
    """Has a layer for train mode, under another condition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, refine: bool = False) -> Tensor:
        """Run the extra layer while training, where that is asked for."""
        x = self.stem(x)
        if refine or x.shape[0] > 64:
            if self.training:
                x = self.extra(x)
            x = x.relu()
        return x


def test_a_mode_that_only_another_argument_asks_for() -> None:
    """The run that asks is repeated in train mode."""
    graph = engine.trace(Nested(), torch.zeros(2, 4))
    assert "extra.weight" in graph.stored
