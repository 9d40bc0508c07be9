"""Modules that code which did not run would put in the place of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Runs one of two activations, and another one in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.act, self.other = nn.ReLU(), nn.Softmax(-1)

    def forward(self, x: Tensor, option: Any = None) -> Tensor:
        """Return scores."""
        act: nn.Module = self.act
        if option is not None:
            act = self.other
        last = nn.Tanh()
        return self.leave(last(self.middle(act(self.enter(x)))))  # type: ignore[no-any-return]


def test_only_what_goes_through_the_variable_is_kept() -> None:
    """The reason names the code that chooses; what goes through other layers is free."""
    groups = {g.name: g for g in engine.dependency_groups(Net().eval(), torch.zeros(2, 3))}
    assert "test_replaced_calls.py" in str(groups["enter"].reason) and groups["middle"].reason is None
