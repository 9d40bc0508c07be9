"""Runs that differ from the one on the example, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Adds a multiple of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, twice: bool = False, scale: float = 2.0) -> Tensor:
        """Return features."""
        x = self.layer(x) * scale
        return self.other(x) if twice else x


def test_another_path_is_kept() -> None:
    """The layer that a flag switches on is part of the program."""
    assert "other.weight" in engine.trace(Net(), torch.zeros(2, 4)).stored


def test_another_number_varies() -> None:
    """It is uncertain in the runs that are part of the program."""
    graph = engine.trace(Net(), torch.zeros(2, 4))
    assert {graph.nodes[index].op for index, _ in graph.varying} == {"mul"}


def test_the_model_is_left_alone() -> None:
    """Neither its defaults nor the arguments of the example change."""
    options = {"scale": 2.0, "x": torch.zeros(2, 4)}
    engine.trace(Net(), options)
    assert options["scale"] == 2.0 and Net.forward.__defaults__ == (False, 2.0)
