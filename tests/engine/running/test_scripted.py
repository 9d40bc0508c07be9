"""Functions that torch compiled are recorded as the Python functions that they are made of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.running.scripted import unscripted
from tests.engine.exactness import channel_masks, masked, randomised, relative_error


def turned(y: Tensor) -> Tensor:
    """Return the channels in another order, for twenty rows."""
    if y.shape[0] == 20:
        return y.roll(3, 1)
    return y.relu()


def gated(y: Tensor) -> Tensor:
    """Return what decides nothing."""
    return y * y.sigmoid()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch means to remove it
    compiled: Any = torch.jit.script(turned)
    compiled_gate: Any = torch.jit.script(gated)


class Scripted(nn.Module):
    """Calls a compiled function by a global, and by an attribute of its class."""

    inner = staticmethod(compiled)

    def __init__(self, by_class: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.by_class = nn.Linear(8, 8), nn.Linear(8, 3), by_class

    def forward(self, x: Tensor) -> Any:
        """Return scores."""
        h = compiled_gate(self.enter(x))
        return self.leave(self.inner(h) if self.by_class else compiled(h))


@pytest.mark.parametrize("by_class", [False, True])
def test_branches_inside_are_followed(by_class: bool) -> None:
    """What only another size runs keeps its channels."""
    model = randomised(Scripted(by_class)).double()
    masks = channel_masks(model, 1)
    reference = masked(model, masks)
    engine.ModelSpeedup(model, torch.rand(4, 8).double(), masks).speedup_model()
    for rows in (4, 20):
        x = torch.randn(rows, 8).double()
        assert relative_error([reference(x).detach()], [model(x).detach()]) < 1e-9


def test_names_are_put_back() -> None:
    """Those that decide nothing stay as they are."""
    model = Scripted(False)
    with unscripted(model):
        assert compiled is turned and Scripted.inner is turned and compiled_gate is not gated
    assert isinstance(compiled, torch.jit.ScriptFunction) and isinstance(Scripted.inner, torch.jit.ScriptFunction)
