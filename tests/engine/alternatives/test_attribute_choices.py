"""Lists of numbers that code sets later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.attribute_choices import _further_numbers
from engine.alternatives.attributes import Attribute


class Fused(nn.Module):
    """Adds levels up, by their indices, which a method sets."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.levels = nn.Linear(3, 6), nn.Linear(6, 2), [0, 1]

    def choose(self, levels: Any) -> None:
        """Set them."""
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        """Add up."""
        h = self.enter(x)
        parts = [h, h * 2]
        y: Tensor = self.leave(sum(parts[i] for i in self.levels))
        return y


class Repeated(Fused):
    """Passes the list on."""

    def forward(self, x: Tensor) -> Tensor:
        """Say how often to repeat."""
        y: Tensor = self.leave(self.enter(x)).repeat(self.levels[1], 1)
        return y.flip(dims=self.levels)


@pytest.mark.parametrize(("make", "whole"), [(Fused, True), (Repeated, False)])
def test_what_reads_a_list_is_kept_if_it_chooses_by_it(make: type[Fused], whole: bool) -> None:
    """To pass a number on is no choice."""
    groups = engine.dependency_groups(make(), torch.zeros(2, 3))
    hidden = next(group for group in groups if "enter.weight" in {member.parameter for member in group.members})
    assert (hidden.reason is not None) is whole
    assert not whole or "numbers or texts that code sets later" in str(hidden.reason)


@pytest.mark.parametrize(("other", "further"), [(4, [5, 6, 7]), (2, [1, 0]), (7, []), (3.0, [])])
def test_numbers_that_go_on(other: float, further: list[int]) -> None:
    """One step leads to the next, in its direction, and to no negative number."""
    net = nn.Module()
    net.depth = 3  # type: ignore[assignment]
    settings = _further_numbers([(Attribute("", net, "depth"), other)])
    assert [value for [(_, value)] in settings][:3] == further
