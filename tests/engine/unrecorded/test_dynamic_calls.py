"""Ops in functions that the caller chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine


class Net(nn.Module):
    """A function by its name, between two layers."""

    def __init__(self, act: str = "relu") -> None:
        super().__init__()
        self.enter, self.leave, self.act = nn.Linear(3, 8), nn.Linear(8, 2), act

    def forward(self, x: Tensor, act: str = "tanh", other: Any = None) -> Tensor:
        """Return scores."""
        x = getattr(F, self.act)(self.enter(x))  # settled by the constructor
        if other is not None:
            x = other(x)
        return self.leave(x if act == "none" else getattr(torch, act)(x) * 2)  # type: ignore[no-any-return]


def test_only_what_goes_through_it() -> None:
    """What a constructor settles, and the ops around, are left alone; so is a call that did not run."""
    graph = engine.trace(Net(), torch.zeros(1, 3))
    reasons = {graph.nodes[v.producer].op: graph.exits[v.index] for v in graph.outputs if v.index in graph.exits}
    assert set(reasons) >= {"relu", "tanh"} and "linear" not in {
        op for op, reason in reasons.items() if "caller chooses" in reason
    }
    assert "tests/engine/unrecorded/test_dynamic_calls.py" in reasons["tanh"] and "mul" not in reasons
