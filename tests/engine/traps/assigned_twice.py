"""Traps: code that did not run computes features again, and assigns other ones to the same variable as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from engine.flow.branches import Branch
from tests.engine.traps.trap import Ablation, at_other_length

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Reads one of two features, and the other one in any case."""

    def __init__(self, chosen: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 8), nn.Linear(3, 8)
        self.head, self.beside, self.chosen = nn.Linear(8, 2), nn.Linear(8, 2), chosen

    def forward(self, x: Tensor) -> Any:
        h, z = self.one(x).relu(), self.other(x).sigmoid()
        return self.head(self.chosen(self, x, h, z)) + self.beside(z)


def _after(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h = h * 2
        h = z
    return h


def _before(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h = z
        h = h * 2
    return h


def _by_a_layer(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h *= 2
        h = net.other(x)
    return h


def _by_a_loop(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h *= 2
        for h in [z]:  # noqa: B007  the loop is what sets it
            pass
    return h


def _in_an_expression(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h = h * 3
        if (h := z) is not None:
            pass
    return h


def _swapped(net: Any, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
    if len(h) == 77:
        h = h * 3
        h, z = z, h
    return h


_FORMS = {
    "after it is scaled": _after,
    "before it is scaled": _before,
    "by a layer": _by_a_layer,
    "by a loop": _by_a_loop,
    "in an expression": _in_an_expression,
    "by a swap": _swapped,
}


_SOURCE = "schedules for large inputs: `if n > limit: h = h * scale; h = cheap`"
TRAPS = [
    at_other_length(f"a variable that gets other features {name}", _SOURCE, functools.partial(_Net, chosen))
    for name, chosen in _FORMS.items()
]


def _assignments_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branch, "replaces", lambda self, name: False)


ABLATIONS = [
    Ablation(
        "a variable is computed again only if all that it is assigned follows from it",
        _assignments_do_not_count,
        "a variable that gets other features after it is scaled",
    )
]
