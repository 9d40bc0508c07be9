"""Conditional expressions whose value no variable holds: which values have to keep all channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.leave = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.early = False


class OfVariables(_Net):
    """Feeds one of two variables to the head."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        h = self.first(x).sigmoid()
        g = self.second(h).sigmoid()
        return self.leave((h if len(x) == 77 else g).cos())


class OfResults(_Net):
    """Feeds one of two results to the head."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        h = self.first(x).sigmoid()
        return self.leave((h if len(x) == 77 else self.second(h).sigmoid()).cos())


class Bound(_Net):
    """Never feeds the first features to the head: only the constructor sets the flag."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        h = self.first(x).sigmoid()
        g = self.second(h).sigmoid()
        return self.leave((h if self.early else g).cos())


class Smallest(_Net):
    """Chooses between two ways to compute a number from sizes."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        h = self.first(x).sigmoid()
        sizes = (len(x), x.shape[1])
        self.window = torch.min(torch.tensor(sizes)) if torch.jit.is_tracing() else min(sizes)
        return self.leave(self.second(h).sigmoid())


class SmallestOfFeatures(_Net):
    """Picks one of two features by Python's own function."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        h = self.first(x).sigmoid()
        g = self.second(h).sigmoid()
        return self.leave(h if torch.jit.is_tracing() else max(g, h, key=lambda t: float(t.sum())))


@pytest.mark.parametrize(
    ("cls", "whole"),
    [(OfVariables, True), (OfResults, True), (Bound, False), (Smallest, False), (SmallestOfFeatures, True)],
)
def test_both_sides_are_kept(cls: type[nn.Module], whole: bool) -> None:
    """A reader that may get either value needs all channels of both."""
    model, x = cls(), torch.randn(2, 3)
    kept = [layer for group in engine.dependency_groups(model, x) if group.reason for layer in group.layers]
    assert ("second" in kept) is whole
