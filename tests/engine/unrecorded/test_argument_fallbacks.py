"""Constants and numbers that replace omitted arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


class Cell(nn.Module):
    """Starts from zeros without a state, and adds nothing without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return scores."""
        if state is None:
            state = torch.zeros(1, 4)
        features = self.enter(x) * state
        return self.leave(features + (0.0 if bias is None else bias))  # type: ignore[no-any-return]


def test_they_are_used_and_vary() -> None:
    """Other calls pass a state and a bias of full size."""
    graph = engine.trace(Cell(), torch.zeros(1, 3))
    reasons = "\n".join(graph.exits.values())
    assert "replaces the argument 'state'" in reasons and "without an argument that other calls may pass" in reasons
    assert not any(graph.unsettled.values()) and graph.exits.keys() <= graph.unsettled.keys()


class Scaled(Cell):
    """Computes with the number that stands in for a scale."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return scores."""
        gain = 2 * (1 if scale is None else scale)
        return self.leave(self.enter(x).relu() * gain)  # type: ignore[no-any-return]


def test_what_is_computed_of_a_number_varies() -> None:
    """The product with twice a number, but not what comes before or behind it."""
    graph = engine.trace(Scaled(), torch.zeros(1, 3))
    [product] = [node for node in graph.nodes if node.op == "mul"]
    assert graph.exits.keys() == {product.outputs[0].index}
