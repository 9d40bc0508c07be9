"""Arguments that the example leaves out, beside other values: what is kept, and what need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 6), nn.Linear(6, 2)


class Joined(_Net):
    """Adds an argument to the features, if there is one."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        """Return logits."""
        return self.leave(sum(t for t in (self.enter(x), shift) if t is not None))


class Asked(_Net):
    """Only tests the argument, and hands it on."""

    def scaled(self, h: Tensor, scale: Tensor | None) -> Tensor:
        """Return the features, scaled if there is a scale."""
        return h if scale is None else h * scale

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        """Return logits."""
        return self.leave(self.scaled(self.enter(x).relu(), scale))


class Replaced(_Net):
    """Puts a tensor in place of the argument."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        """Return logits."""
        h = self.enter(x)
        if state is None:
            state = torch.zeros_like(x)
        return self.leave(h), torch.cat([x, state])


class Returned(_Net):
    """Returns the argument beside the logits."""

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Any:
        """Return both."""
        return self.leave(self.enter(x)), cache


def _reasons(model: nn.Module, **options: Any) -> list[str]:
    x = torch.randn(2, 3)
    graph = engine.trace(model, x, **options)
    return [group.reason or "" for group in engine.dependency_groups(model, x, graph=graph)]


@pytest.mark.parametrize(("cls", "whole"), [(Joined, True), (Asked, False), (Replaced, False), (Returned, False)])
def test_what_an_omitted_argument_may_join_is_kept(cls: type[nn.Module], whole: bool) -> None:
    """The reason names the function; a test of the argument, or a stand-in, is followed elsewhere."""
    reasons = _reasons(cls())
    assert any("forward by what the example leaves out" in reason for reason in reasons) is whole


def test_a_declared_argument_joins_nothing() -> None:
    """The user says that no call passes it."""
    assert not any("leaves out" in reason for reason in _reasons(Joined(), constants=["shift"]))
