"""Tests of the runs that start from those which evaluate something new."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording import combinations


class Conditions(nn.Module):
    """A layer runs where an argument is true and the model is in train mode, or the batch is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.usual, self.rare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, refine: bool = False) -> Tensor:
        """Run two layers."""
        x = self.stem(x)
        y: Tensor = (self.usual, self.rare)[int(refine and (self.training or x.shape[0] % 2 == 1))](x)
        return y


class Three(Conditions):
    """Three conditions."""

    deep = False

    def go_deep(self) -> None:
        """Run the layer."""
        self.deep = True

    def forward(self, x: Tensor, refine: bool = False) -> Tensor:
        """Run two layers."""
        x = self.stem(x)
        y: Tensor = (self.usual, self.rare)[int(x.shape[0] % 2 == 1 and refine and self.deep)](x)
        return y


class Asks(Conditions):
    """Asks for data where an argument is true."""

    def forward(self, x: Tensor, refine: bool = False) -> Tensor:
        """Run two layers."""
        x = self.stem(x)
        y: Tensor = (self.usual, self.rare)[int(refine and float(x.mean()) > 9)](x)
        return y


@pytest.mark.parametrize("kind", [Conditions, Three, Asks])
def test_what_runs_under_several_conditions_is_recorded(kind: type[Conditions]) -> None:
    """A mode, a size, an attribute or data that are asked for only in another run."""
    graph = engine.trace(kind(), torch.zeros(2, 4))
    assert "rare.weight" in graph.stored


def test_a_model_without_conditions_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run starts from others."""
    started = []
    monkeypatch.setattr(combinations.Combinations, "_turn_modes", lambda self, start, modes: started.append(start))
    graph = engine.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4))
    assert not started and {node.path for node in graph.nodes} == {"eval"}


def test_what_is_beyond_the_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes say how many runs were not followed."""
    monkeypatch.setattr(combinations, "MOST_STARTS", 0)
    graph = engine.trace(Conditions(), torch.zeros(2, 4))
    assert any("conditions that no other run reaches" in note for note in graph.notes)


def test_buffers_are_as_before() -> None:
    """Also where a run takes data that the run on the example does not need."""

    class Counts(Asks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor, refine: bool = False) -> Tensor:
            self.calls += 1
            return super().forward(x, refine)

    model = Counts()
    engine.trace(model, torch.zeros(2, 4))
    assert float(model.calls) == 0


def test_code_that_asks_nothing_takes_no_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with new code starts others only if that code names something that may be turned."""

    class Plain(Conditions):
        def forward(self, x: Tensor, twice: bool = False, shift: bool = False) -> Tensor:
            x = self.stem(x)
            if twice:
                x = self.usual(x).relu()
            if shift:
                x = x + 1
            return x

    monkeypatch.setattr(combinations, "MOST_STARTS", 0)
    graph = engine.trace(Plain(), torch.zeros(2, 4))
    assert "usual.weight" in graph.stored
    assert not any("conditions that no other run reaches" in note for note in graph.notes)
