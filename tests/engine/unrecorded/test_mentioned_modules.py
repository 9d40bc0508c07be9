"""Modules that did not run, and that code which ran got hold of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.unrecorded.mentioned_modules import modules_in


class Net(nn.Module):
    """Picks a layer."""

    pick: Callable[[Tensor], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = {1: self.one, 77: self.other}

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.leave(self.pick(x)(self.enter(x)))  # type: ignore[no-any-return]


def _from_a_table(net: Any, x: Tensor) -> Any:
    return net.table.get(len(x), net.one)


def _from_a_tuple(net: Any, x: Tensor) -> Any:
    return (net.one, net.other)[len(x) // 77]


def _from_all(net: Any, x: Tensor) -> Any:
    return [part for part in net.children() if part.out_features == 4][1]


def _tested(net: Any, x: Tensor) -> Any:
    return net.one if net.other is not None else net.enter


@pytest.mark.parametrize("pick", [_from_a_table, _from_a_tuple, _from_all], ids=lambda pick: pick.__name__)
def test_it_could_be_called_next_time(pick: Callable[..., Any]) -> None:
    """What the other layer reads, and what it would compute another value of, is used."""
    graph = engine.trace(type("Picks", (Net,), {"__module__": __name__, "pick": pick})(), torch.zeros(1, 3))
    assert [how for how in graph.exits.values() if "could be read or replaced by 'other', which did not run" in how]


def test_one_that_is_only_tested_for_is_not_called() -> None:
    """Whether it is there does not run it."""
    graph = engine.trace(type("Tests", (Net,), {"__module__": __name__, "pick": _tested})(), torch.zeros(1, 3))
    assert not any("'other'" in how for how in graph.exits.values())


def test_modules_in_containers() -> None:
    """A module is none, a list of modules and tables in tables are."""
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert list(modules_in([{"a": (1, layer)}, nn.ModuleList([other])])) == [layer, other]
    assert not list(modules_in(nn.Sequential(layer)))
