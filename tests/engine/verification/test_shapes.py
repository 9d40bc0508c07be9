"""The compacted model runs as it was predicted to, in each mode."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import VerificationError
from engine.verification.shapes import check_shapes
from tests.engine.nets import analysis_of


class Trains(nn.Module):
    """Takes another way while it trains; ``extra`` says what it does there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.extra = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, 2)."""
        x = self.stem(x)
        if self.training and self.extra == "copy":
            x = x.clone()
        if self.training and self.extra == "layer":
            x = x + self.stem(F.pad(x[:, :3], (1, 1, 1, 1)))
        return self.head(x.relu()).mean((2, 3))


@pytest.mark.parametrize(("before", "after"), [("", "copy"), ("copy", ""), ("", "layer"), ("layer", "")])
def test_what_runs_while_training(before: str, after: str) -> None:
    """A copy more or less in train mode is the same way through the layers; a layer more or less is not."""
    model = Trains()
    model.extra = before
    analysis = analysis_of(model, torch.randn(2, 3, 8, 8), {})
    model.extra = after
    if "layer" in (before, after):
        with pytest.raises(VerificationError, match="another path"):
            check_shapes(model, analysis)
    else:
        check_shapes(model, analysis)


class LayerDrop(nn.Module):
    """Leaves out layers as draws decide while training (arXiv 1909.11556, as in transformers' BART)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum over the layers that stay."""
        for layer in self.layers:
            if not (self.training and min(torch.rand([]), random.random(), np.random.rand()) < 0.3):
                x = x + layer(x).relu()
        return x


def test_draws_that_decide_come_out_the_same() -> None:
    """Whatever was drawn since the model was recorded."""
    model = LayerDrop()
    analysis = analysis_of(model, torch.randn(2, 4), {})
    for _ in range(3):
        torch.rand(1), random.random(), np.random.rand()
        check_shapes(model, analysis)
