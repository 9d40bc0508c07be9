"""Tests of the runs at other values of what lies outside of the model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

FAST, REQUIRED = False, True
LIMITS = {"depth": 1}


def set_depth(depth: int) -> None:
    """Set a limit."""
    LIMITS["depth"] = depth


class Branches(nn.Module):
    """Picks a layer by several values."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.deep, self.options = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        """Run layers."""
        x = (self.usual, self.rare)[int(FAST)](x)
        return self.deep(x) if LIMITS["depth"] > 6 else x


class Needs(nn.Module):
    """Fails without a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        if not REQUIRED:
            raise RuntimeError("not installed")
        y: Tensor = self.layer(x)
        return y


class Held(nn.Module):
    """Several parts have an object each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(Part() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        """Run the parts."""
        y: Tensor = self.parts(x)
        return y


class Part(nn.Module):
    """Has options of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.options = nn.Linear(4, 4), nn.Linear(4, 4), SimpleNamespace(swapped=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run one of two layers."""
        y: Tensor = (self.one, self.other)[int(self.options.swapped)](x)
        return y

    def swap(self) -> None:
        """Run the other one."""
        self.options.swapped = True


def test_layers_at_other_values_are_recorded() -> None:
    """A flag, and a number that code sets; both are as before."""
    graph = engine.trace(Branches(), torch.zeros(2, 4))
    assert {"usual.weight", "rare.weight", "deep.weight"} <= graph.stored.keys()
    assert FAST is False and LIMITS == {"depth": 1}


def test_objects_of_all_modules_change_together() -> None:
    """Parts of one class are switched at once."""
    model = Held()
    graph = engine.trace(model, torch.zeros(2, 4))
    assert {"parts.0.other.weight", "parts.1.other.weight"} <= graph.stored.keys()
    assert not any(part.options.swapped for part in model.parts)


def test_a_value_that_the_model_needs_is_named() -> None:
    """Where the model does not run at another value, the notes say so."""
    graph = engine.trace(Needs(), torch.zeros(2, 4))
    assert any("REQUIRED" in note and "only the present value" in note for note in graph.notes)
    assert REQUIRED is True


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that was set is set again, and one that was not is not."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = float(os.environ.get("TEST_SCALE", "1")) + len(os.environ.get("TEST_UNSET", ""))
            y: Tensor = self.layer(x) * scale
            return y

    monkeypatch.setenv("TEST_SCALE", "2")
    before = dict(os.environ)
    engine.trace(Reads(), torch.zeros(2, 4))
    assert dict(os.environ) == before


def test_an_entry_is_recorded_at_other_values() -> None:
    """What a step reads only where a flag is set is part of the program."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def step(x: Tensor) -> Any:
        return (model[0], nn.Sequential(model[0], nn.ReLU()))[int(FAST)](x).sum()

    graph = engine.trace(model, torch.zeros(2, 4), entries={"step": (step, (torch.zeros(2, 4),), {})})
    assert any(node.op == "relu" for node in graph.nodes)


DEPTH = 1


def leave_out(depth: int) -> None:
    """Set how many layers are left out at the end."""
    global DEPTH
    DEPTH = depth


class Shallower(nn.Module):
    """Leaves layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        levels = [x := layer(x).relu() for layer in self.layers]
        for _ in range(DEPTH):
            levels.pop()
        return self.head(levels[-1])  # type: ignore[no-any-return]


def test_whole_numbers_go_on_as_long_as_they_lead_to_something_new() -> None:
    """The head reads the level of each number."""
    graph = engine.trace(Shallower(), torch.zeros(2, 4))
    assert len({node.inputs[0].index for node in graph.nodes if node.module == "head"}) == 5
    assert DEPTH == 1


_available, _switched = True, True


def switch(on: bool) -> None:
    """Set a private flag."""
    global _switched
    _switched = on


class Optional(nn.Module):
    """Reads a flag that stays, in whatever module another one is installed, and one that a function sets."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run two layers."""
        x = self.usual(x) if _available else self.rare(x)
        return self.other(x) if _switched else x


def test_a_private_flag_that_no_function_sets_stays() -> None:
    """It says what is installed; nobody sets it from outside."""
    graph = engine.trace(Optional(), torch.zeros(2, 4))
    assert {node.module for node in graph.nodes} == {"usual", "other"}
    outer = engine.trace(nn.Sequential(Optional(), nn.Linear(4, 4)), torch.zeros(2, 4))
    assert any(node.module == "1" and outer.nodes[node.inputs[0].producer].module == "0.usual" for node in outer.nodes)


class Config:
    """Keeps the name of an implementation behind a property, as configurations of transformers do."""

    def __init__(self) -> None:
        self._implementation = "fast"

    @property
    def implementation(self) -> str:
        """The name."""
        return self._implementation

    @implementation.setter
    def implementation(self, name: str) -> None:
        self._implementation = name


class Named(nn.Module):
    """Picks a layer by that name."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.config = nn.Linear(4, 4), nn.Linear(4, 4), Config()

    def use(self, name: str) -> None:
        """Choose an implementation."""
        self.config.implementation = name

    def forward(self, x: Tensor) -> Tensor:
        """Run one of two layers."""
        layer = self.rare
        if self.config.implementation != "eager":
            layer = self.usual
        return layer(x)  # type: ignore[no-any-return]


def test_a_text_behind_a_property_is_recorded_at_other_values() -> None:
    """Both implementations are part of the program."""
    model = Named()
    graph = engine.trace(model, torch.zeros(2, 4))
    assert {node.module for node in graph.nodes} == {"usual", "rare"}
    assert model.config.implementation == "fast"
