"""Items that code picks by numbers which it computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import engine


class Picking(nn.Module):
    """Picks one of two by an epoch, which a method sets."""

    def __init__(self, every: int = 10) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 6), nn.Linear(6, 2)
        self.passed_epochs, self.every = 0, every

    def advance(self, epochs: int) -> None:
        """Set it."""
        self.passed_epochs = epochs

    def forward(self, x: Tensor) -> Tensor:
        """Turn the features round in every other period."""
        h = self.enter(x)
        y: Tensor = self.leave((h, h.flip(-1))[self.passed_epochs // self.every % 2])
        return y


class ByVariable(Picking):
    """By way of variables."""

    def forward(self, x: Tensor) -> Tensor:
        """Do the same."""
        h = self.enter(x)
        both = [h, h.flip(-1)]
        period = self.passed_epochs // self.every
        odd = period % 2
        y: Tensor = self.leave(both[odd])
        return y


class ByKey(Picking):
    """From a dictionary."""

    def forward(self, x: Tensor) -> Tensor:
        """Do the same."""
        h = self.enter(x)
        y: Tensor = self.leave({1: h.flip(-1)}.get(self.passed_epochs // self.every % 2, h))
        return y


class ByConstructor(Picking):
    """By a number that only the constructor sets, and by what a loop counts."""

    def forward(self, x: Tensor) -> Tensor:
        """Pick the same in each call."""
        h = self.enter(x)
        parts = [h, h * 2]
        y: Tensor = self.leave(parts[self.every // 6] + sum(parts[i - 1] for i in range(2)))
        return y


@pytest.mark.parametrize("kind", [Picking, ByVariable, ByKey])
def test_what_may_be_picked_stays(kind: type[Picking]) -> None:
    """All that the function computes, named by the number."""
    reasons = {g.name: g.reason for g in engine.dependency_groups(kind(), torch.rand(2, 3))}
    assert "which may be another number" in str(reasons["enter"])


def test_what_is_picked_the_same_in_each_call_goes() -> None:
    """No code sets the number."""
    reasons = {g.name: g.reason for g in engine.dependency_groups(ByConstructor(), torch.rand(2, 3))}
    assert reasons["enter"] is None


class ByName(Picking):
    """By the name of a field, which is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, field: str = "p0") -> tuple[Tensor, Tensor]:
        """Return scores of a field, and others."""
        levels = self.enter(x), self.other(x)
        fields = SimpleNamespace(**{f"p{k}": level for k, level in enumerate(levels)})
        return self.leave(getattr(fields, field)), self.last(levels[1])


def test_a_field_by_a_name_of_the_callers() -> None:
    """It may be any field of the object, whose names may stand nowhere else."""
    reasons = {g.name: g.reason for g in engine.dependency_groups(ByName(), torch.rand(2, 3))}
    assert "could be picked in forward by field" in str(reasons["other"])
