"""What code that did not run combines variables with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Combines features with something in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.gain, self.limit = nn.Parameter(torch.ones(4)), 2.0

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            y = y * torch.sigmoid(z)
        return self.last(y)  # type: ignore[no-any-return]


class ByGain(Net):
    """Combines them with a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y = self.first(x)
        if not y.is_contiguous():
            y = y * (self.gain + 1)
        return self.last(y)  # type: ignore[no-any-return]


class ByPart(Net):
    """Combines them with some others."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            y = y * z[..., :1]
        return self.last(y)  # type: ignore[no-any-return]


class ByNumber(Net):
    """Combines them with numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            y = y * self.limit * z.mean() * len(y)
        return self.last(y)  # type: ignore[no-any-return]


class ByComputedNumber(Net):
    """Clamps them to what the branch computes, as T5 does in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y = self.first(x)
        if not y.is_contiguous():
            most = torch.finfo(y.dtype).max
            limit = torch.where(torch.isinf(y).any(), most - 1000, most)
            y = torch.clamp(y, min=-limit, max=limit)
        return self.last(y)  # type: ignore[no-any-return]


class ByComputedFeatures(Net):
    """Clamps them to other features, which the branch computes from what it sets."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            limit = torch.where(z > 0, z, 1.0)
            limit = limit + 1
            y = torch.clamp(y, max=limit)
        return self.last(y)  # type: ignore[no-any-return]


class ByVariable(Net):
    """Clamps them to features in a variable of the branch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            limit = torch.where(z > 0, z, 1.0)
            y = torch.clamp(y, max=limit)
        return self.last(y)  # type: ignore[no-any-return]


_OTHERS = [(ByComputedNumber, set()), (ByComputedFeatures, {0, 1}), (ByVariable, {0, 1})]


@pytest.mark.parametrize(
    ("model", "dims"), [*_OTHERS, (Net, {0, 1}), (ByGain, {1}), (ByPart, {0, 1}), (ByNumber, set())]
)
def test_sizes_are_kept_along_those_of_operands(model: type[Net], dims: set[int]) -> None:
    """Unless an operand is a single number; of what is computed otherwise, the shape is unknown."""
    graph = engine.trace(model(), torch.zeros(2, 3))
    assert set().union(*graph.whole_along.values()) == dims


class ByResult(Net):
    """Adds the result of a layer again."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y, z = self.first(x), self.second(x)
        if not y.is_contiguous():
            y = y + self.second(x)
        return self.last(y) + self.last(z)  # type: ignore[no-any-return]


def test_results_of_layers_replace_features() -> None:
    """Both lose the same channels."""
    graph = engine.trace(ByResult(), torch.zeros(2, 3))
    results = [node.output.index for node in graph.nodes if node.module in ("first", "second")]
    assert sorted(results) in [sorted(group) for group in graph.interchangeable]
