"""What branches do with the results of modules that ran elsewhere, by the groups that may lose channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import randomised


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.between, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])


class _Returned(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Return the result of a layer in the branch."""
        if other is not None:
            return self.encode(other)
        return self.leave(self.between(self.encode(x)))


class _GoesOn(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Call the layers in the branch as elsewhere."""
        if other is not None:
            h = self.encode(other)
            return self.leave(self.between(h))
        return self.leave(self.between(self.encode(x)))


class _ToAnother(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Leave out a layer in the branch."""
        if other is not None:
            return self.leave(self.encode(other))
        return self.leave(self.between(self.encode(x)))


class _Item(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Call an item of a list in the branch."""
        if other is not None:
            return self.layers[0](other).mean(1)
        return self.layers[1](self.layers[0](x)) + self.leave(self.between(self.encode(x)))


class _Dropped(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Call a layer for nothing in the branch."""
        if other is not None:
            self.encode(other)
        return self.leave(self.between(self.encode(x)))


class _Around(_Net):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """Set variables to parts of themselves and of each other in the branch."""
        h = self.encode(x)
        if other is not None:
            part: Any = [h]
            rest: Any = [other]
            part = part[0]
            rest = part[1]
            part = rest[0]
            return torch.sum(part)
        return self.leave(self.between(h))


@pytest.mark.parametrize(
    ("cls", "whole"),
    [
        (_Returned, {"encode"}),
        (_GoesOn, set()),
        (_ToAnother, {"encode", "between"}),
        (_Item, {"layers.0"}),
        (_Dropped, set()),
        (_Around, {"encode"}),
    ],
)
def test_which_layers_stay_whole(cls: type[_Net], whole: set[str]) -> None:
    """A layer stays whole where its result goes anywhere else than where it ran."""
    model = randomised(cls())
    groups = engine.dependency_groups(model, torch.randn(2, 4, dtype=torch.float64))
    kept = {layer for g in groups if g.reason and "did not run" in str(g.reason) for layer in g.layers}
    assert kept & {"encode", "between", "layers.0"} == whole
