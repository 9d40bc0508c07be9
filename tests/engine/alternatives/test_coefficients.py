"""What runs where a float in an attribute is another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


class Skips(nn.Module):
    """Leaves a layer out while a number is zero; refuses numbers beyond one."""

    def __init__(self, limit: float = 1.0) -> None:
        super().__init__()
        self.body, self.extra, self.alpha, self.limit = nn.Linear(4, 4), nn.Linear(4, 4), 0.0, limit

    def forward(self, x: Tensor) -> Tensor:
        """Add the second layer where it is open."""
        if self.alpha < 0 or self.alpha > 2:
            raise ValueError("alpha")
        x = self.body(x)
        return x + self.alpha * self.extra(x) if self.alpha > 0 else x


def test_the_other_branch_is_recorded() -> None:
    """The layer that did not run is part of the program, and the model is as before."""
    model = Skips()
    graph = engine.trace(model, torch.zeros(2, 4))
    assert {"extra.weight", "body.weight"} <= graph.stored.keys()
    assert type(model.alpha) is float and model.alpha == 0.0


def test_a_number_that_may_change_is_uncertain() -> None:
    """What a product is given of it varies, in every run."""
    graph = engine.trace(Skips(), torch.zeros(2, 4))
    assert [graph.nodes[index].op for index in graph.uncertain] == ["mul"]


def test_a_declaration() -> None:
    """A number that stays is a plain one."""
    graph = engine.trace(Skips(), torch.zeros(2, 4), constants=["alpha"])
    assert "extra.weight" not in graph.stored
