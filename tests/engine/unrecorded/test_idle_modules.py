"""Modules that no recording ran."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.unrecorded.idle_modules import IdleModules, unrecorded_methods


class Heads(nn.Module):
    """A head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 4)
        self.heads = nn.ModuleDict({"cars": nn.Linear(4, 2), "cats": nn.Linear(4, 2)})

    def encode(self, x: Tensor) -> Tensor:
        """Return features."""
        return self.enter(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of one task."""
        return self.heads["cars"](self.enter(x))  # type: ignore[no-any-return]


def test_what_siblings_read_and_compute_is_used() -> None:
    """Another head would read the same features, and return its own scores."""
    graph = engine.trace(Heads(), torch.zeros(1, 3))
    assert [how for how in graph.exits.values() if "could be read or replaced by 'heads.cats'" in how]


def test_names_of_modules_and_of_those_around_them() -> None:
    """A module did not run if no parameter of a part of it was read."""
    idle = IdleModules(["a.b.weight", "a.c.weight", "weight"], {})
    assert idle.owners == ["", "a.b", "a.c"]
    assert idle.includes_any({"a"}) and idle.includes_any({"a.c"}) and not idle.includes_any({"b"})


def test_methods_that_read_layers() -> None:
    """Forward is recorded; methods without a layer are left out."""
    assert unrecorded_methods([Heads(), nn.Linear(1, 1)]) == ["Heads.encode"]
