"""Where constants of removed channels can go."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.removal.homes import Homes
from engine.removal.structure import structure_of


def homes_of(model: nn.Module, *shape: int) -> tuple[Homes, dict[str, list[object]]]:
    """Return the answers for a model, and those for each call of a weight by the weight's name: (foldable, sink)."""
    structure = structure_of(engine.trace(model.eval(), torch.zeros(*shape)), engine.RULES)
    homes, answers = Homes(structure), {}
    for _, c in structure.contractions():
        sink = homes.sink(c)
        answers.setdefault(c.weight.name, []).append((homes.foldable(c), None if sink is None else sink.name))
    return homes, answers


def test_a_bias_that_goes_with_one_weight() -> None:
    """However often it is called."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.b(self.a(x))
            return x

    _, answers = homes_of(Loop(), 2, 3)
    assert answers == {"a.weight": [(True, "a.bias")] * 3, "b.weight": [(True, None)] * 3}


def test_a_bias_that_two_weights_share_or_something_else_reads() -> None:
    """Neither could tell what was folded into it for the other."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.a(x), self.b.weight, self.a.bias)
            return self.c(x) + self.c.bias

    _, answers = homes_of(Shared(), 2, 3)
    assert {name: sink for name, [(_, sink)] in answers.items()} == dict.fromkeys(
        ("a.weight", "b.weight", "c.weight"), None
    )


def test_a_weight_that_is_read_in_two_ways_takes_nothing_up() -> None:
    """A tied projection would see what is folded into the layer."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.a(x), self.a.weight.t())

    _, answers = homes_of(Tied(), 2, 3)
    assert not any(foldable for calls in answers.values() for foldable, _ in calls)


def test_the_running_mean_behind() -> None:
    """Of the norm that alone reads each call of a layer without a bias."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv1d(3, 3, 1, bias=False), nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))  # type: ignore[no-any-return]

    class Twice(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.conv(self.norm(self.conv(x))))  # type: ignore[no-any-return]

    assert homes_of(Calls(), 2, 3, 4)[1] == {"conv.weight": [(True, "norm.running_mean")]}
    assert homes_of(Twice(), 2, 3, 4)[1] == {"conv.weight": [(True, None)] * 2}
