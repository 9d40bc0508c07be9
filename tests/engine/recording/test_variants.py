"""Runs that differ from the one on the example, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Adds a multiple of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, twice: bool = False, scale: float = 2.0) -> Tensor:
        """Return features."""
        x = self.layer(x) * scale
        return self.other(x) if twice else x


def test_another_path_is_kept() -> None:
    """The layer that a flag switches on is part of the program."""
    assert "other.weight" in engine.trace(Net(), torch.zeros(2, 4)).stored


def test_another_number_varies() -> None:
    """It is uncertain in the runs that are part of the program."""
    graph = engine.trace(Net(), torch.zeros(2, 4))
    assert {graph.nodes[index].op for index, _ in graph.varying} == {"mul"}


def test_the_model_is_left_alone() -> None:
    """Neither its defaults nor the arguments of the example change."""
    options = {"scale": 2.0, "x": torch.zeros(2, 4)}
    engine.trace(Net(), options)
    assert options["scale"] == 2.0 and Net.forward.__defaults__ == (False, 2.0)


def _names(entry: engine.Entry, net: nn.Module) -> list[str]:
    return [entry.name for entry in engine.trace(net, torch.zeros(2, 4), entries=[entry]).entries]


def test_other_arguments_are_entries_where_something_else_runs() -> None:
    """Those that repeat the first run are none, nor are those that the entry rejects."""
    net, x = Net(), torch.zeros(2, 4)

    def step(x: Tensor, number: int = 0) -> Tensor:
        return net(x).mean() + net.layer.bias.std() if number == 3 else net(x).mean()

    others = {f"number {n}": ((x, n), {}) for n in (1, 3)} | {"broken": ((x, 0, 1, 2), {})}
    assert _names(engine.Entry(step, (x,), others=others), net) == ["step", "step, number 3"]


class Owner(nn.Module):
    """A module around a network, with a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.phase = Net(), 0

    def step(self, x: Tensor) -> Tensor:
        """Add a penalty in the second phase."""
        return self.net(x).mean() + self.net.layer.weight.std() if self.phase else self.net(x).mean()

    def advance(self) -> None:
        """Begin the second phase."""
        self.phase = 1


def test_what_an_attribute_switches_on() -> None:
    """It is an entry, unless the attribute is declared; recorded again, the entries are the same."""
    owner, x = Owner(), torch.zeros(2, 4)
    graph = engine.trace(owner.net, x, entries=[engine.Entry(owner.step, (x,))])
    assert [entry.name for entry in graph.entries] == ["step", "step, phase=1"] and owner.phase == 0
    assert [e.name for e in engine.trace(owner.net, x, entries=graph.entries).entries] == ["step", "step, phase=1"]
    assert _names(engine.Entry(owner.step, (x,), fixed=["phase"]), owner.net) == ["step"]
