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
    assert not any(graph.unsettled.values()) and len(graph.unsettled) == 2
