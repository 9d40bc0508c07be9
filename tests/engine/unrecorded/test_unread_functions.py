"""Models whose classes were compiled from strings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import engine
from tests.engine.exactness import channel_masks, masked, parameters, randomised, run

BLOCKS = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x):
        y = self.norm(self.two(F.relu(self.one(x))))
        if {condition}:
            x = self.shortcut(x)
        return F.relu(x + y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, 8, 1), Block(8, 8, 1)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
"""


def network(condition: str) -> nn.Module:
    """A residual network of which no file holds the text."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(BLOCKS.format(condition=condition), space)
    return randomised(space["Net"]())


@pytest.mark.parametrize(
    ("condition", "is_cut"),
    [
        ("self.shortcut is not None", True),
        ("not self.shortcut is None", True),
        ("hasattr(self, 'shortcut') and self.shortcut is not None", True),
        ("x.shape[1] != y.shape[1]", False),
    ],
)
def test_a_residual_network(condition: str, is_cut: bool) -> None:
    """Conditions on what no code reassigns are settled; blocks of another kind stay, and are named."""
    model, images = network(condition), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    masks = engine.fix_mask_conflict(channel_masks(model, 0), model, images)
    reference = masked(model, masks)
    speedup = engine.ModelSpeedup(model, images, masks)
    speedup.speedup_model()
    assert torch.allclose(run(model, images)[0], run(reference, images)[0], rtol=1e-9, atol=1e-12)
    assert (parameters(model) < parameters(reference)) is is_cut
    assert any("forward (<string>:14)" in note for note in speedup.plan.notes) is not is_cut
