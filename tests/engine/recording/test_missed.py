"""A part of a function that no recording reached."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.missed import code_of, methods_of

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code keeps no columns")


class Net(nn.Module):
    """Two layers, and one way for each switch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.leave, self.way = nn.Linear(3, 8), nn.Linear(8, 2), way
        self.idle = nn.Linear(8, 8)

    def beside(self, x: Tensor) -> Tensor:
        """Call what never runs."""
        result: Tensor = self.idle(x)
        return result

    def forward(self, x: Tensor, flag: bool | None = None) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        if self.way == "nothing":
            x = x[:1] if x.dtype == torch.int8 else x
        elif self.way == "idle":
            x = self.beside(x) if flag else x
        elif self.way == "check":
            assert x.shape[1] > 1 or flag
        return self.leave(x)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Two layers, and a branch that only describes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, verbose: bool | None = None) -> Tensor:
        """Return scores."""
        x = self.enter(x)
        if verbose:
            print(x.shape, x.dtype, len(x))
        return self.leave(x)  # type: ignore[no-any-return]


def test_what_goes_to_idle_modules_stays_also_through_methods() -> None:
    """A method of the module is looked into."""
    graph = engine.trace(Net("idle"), torch.zeros(1, 3))
    assert any("could be read" in how for how in graph.exits.values())


def test_descriptions_cost_nothing() -> None:
    """Shapes, dtypes and lengths are not uses of entries."""
    graph = engine.trace(Plain(), torch.zeros(1, 3))
    assert not graph.exits and not graph.unsettled


def test_methods_and_the_attributes_that_they_name() -> None:
    """Those of torch's own classes are none."""
    assert dict(methods_of(Net))["beside"] == {"idle"}
    assert "forward" not in dict(methods_of(Net))
    assert methods_of(nn.Linear) == ()
    assert code_of(Net.forward) is Net.forward.__code__


def _kept(h: Tensor, keep: Tensor | None) -> Tensor:
    if keep is not None and keep.ndim == 2:
        if keep.dtype == torch.bool:
            return h[keep]
        return torch.take_along_dim(h, keep[..., None], dim=1)
    return h


def _ordered(h: Tensor, keep: Tensor | None) -> Tensor:
    if keep is not None:
        return torch.index_select(h, dim=-1, index=keep)
    return h


class Tokens(nn.Module):
    """Takes some of its features in a function beside the class."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.ordered = nn.Linear(3, 8), nn.Linear(8, 2), ordered

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        h = _ordered(h, keep) if self.ordered else _kept(h, keep)
        return self.leave(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ordered", [False, True])
def test_entries_by_an_index_beside_the_channels(ordered: bool) -> None:
    """They leave the channels alone; those along the channels use all of them."""
    groups = engine.dependency_groups(Tokens(ordered), torch.zeros(2, 5, 3))
    [reason] = [group.reason for group in groups if group.name == "enter"]
    assert "could be read" in (reason or "") if ordered else reason is None
