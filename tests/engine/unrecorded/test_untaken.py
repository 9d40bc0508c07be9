"""A branch that no recording took."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine


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


class Missing(nn.Module):
    """Two layers, and a branch that calls a function which is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        if SWITCHES:
            return kernel_that_is_not_installed(h)  # type: ignore[name-defined,no-any-return]  # noqa: F821
        return self.leave(h)  # type: ignore[no-any-return]


class Imported(Missing):
    """The same, but a function imports what the branch calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        if SWITCHES:
            import_kernel()
            return kernel_that_is_imported_later(h)  # type: ignore[name-defined,no-any-return]
        return self.leave(h)  # type: ignore[no-any-return]


SWITCHES: list[int] = []


def import_kernel() -> None:
    """Stands for a function that imports something when it is needed."""
    global kernel_that_is_imported_later
    kernel_that_is_imported_later = torch.relu  # type: ignore[name-defined]


@pytest.mark.parametrize(("net", "kept"), [(Missing, False), (Imported, True)])
def test_code_that_calls_what_is_not_there(net: type[nn.Module], kept: bool) -> None:
    """Nothing reaches a name that no code defines, and so nothing is kept for it."""
    graph = engine.trace(net(), torch.zeros(1, 3))
    assert any("could be read" in how for how in graph.exits.values()) is kept


class Written(nn.Module):
    """Merges the batch and the time where it is told to, with the number of features in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.merges = nn.Linear(3, 8), nn.Linear(8, 2), False

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        if self.merges and x.ndim == 4:
            h = h.reshape(-1, 8)
        return self.leave(h)  # type: ignore[no-any-return]


class Read(Written):
    """The same, with sizes of a shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        h = self.enter(x)
        shape = h.shape
        if self.merges and x.ndim == 4:
            h = h.reshape(shape[0] * shape[1], shape[3], shape[2])
        return self.leave(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("net", "kept"), [(Written, True), (Read, False)])
def test_an_index_is_no_size(net: type[nn.Module], kept: bool) -> None:
    """``shape[3]`` follows, unlike an 8 in the code."""
    graph = engine.trace(net(), torch.zeros(1, 2, 3))
    assert any("could be read" in how for how in graph.exits.values()) is kept


class Cast(nn.Module):
    """Two layers, and a function in between that may return something else than it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 2)

    def between(self, h: Tensor) -> Tensor:
        """Return the same features in another dtype, as the caller says."""
        if SWITCHES:
            return h.to(dtype=torch.float64)
        return h

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.leave(self.between(self.enter(x)))  # type: ignore[no-any-return]


class Flipped(Cast):
    """The same, but something else is returned where nothing is cast."""

    def between(self, h: Tensor) -> Tensor:
        """Return the features in reverse, or those in another dtype."""
        if SWITCHES:
            return h.to(dtype=torch.float64)
        return h.flip(-1)


class Reassigned(Cast):
    """The same, after the features were reversed under their name."""

    def between(self, h: Tensor) -> Tensor:
        """Return the features in reverse, or those in another dtype."""
        if SWITCHES:
            return h.to(dtype=torch.float64)
        h = h.flip(-1)
        return h


class Mixed(Cast):
    """The same, but the other features are mixed."""

    def between(self, h: Tensor) -> Tensor:
        """Return the features, or their running sums."""
        if SWITCHES:
            return h.cumsum(-1)
        return h


@pytest.mark.parametrize(("net", "kept"), [(Cast, False), (Flipped, True), (Reassigned, True), (Mixed, True)])
def test_what_is_returned_in_the_place_of_an_argument(net: type[nn.Module], kept: bool) -> None:
    """To return ``h.to(dtype)`` instead of ``h`` uses none of its entries, unlike in the place of others."""
    graph = engine.trace(net(), torch.zeros(1, 3))
    assert any("could be read" in how for how in graph.exits.values()) is kept
