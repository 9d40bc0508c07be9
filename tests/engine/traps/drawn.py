"""Traps: numbers that a forward draws, in eval mode too, which no draw of another size gives away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.recording import recorder
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

Step = Callable[[Tensor], Tensor]


class _Drawing(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.enter, self.leave, self.step = nn.Linear(8, 8), nn.Linear(8, 3), step

    def forward(self, x: Tensor) -> Any:
        return self.leave(self.step(self.enter(x).relu()))


class _DrawingWithGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.second = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.enter(x)
        return self.second(h + torch.rand(())) if torch.is_grad_enabled() else self.leave(h)


def _seeded(seed: int, gradients: bool = False) -> Use:
    def use(model: nn.Module) -> Any:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients):
            return model.eval()(x)

    return use


def _turned(h: Tensor) -> Tensor:
    return h.roll(3, 1)


def _skipped(h: Tensor) -> Tensor:
    return _turned(h) if torch.rand(()) < 0.5 else h


def _chosen(h: Tensor) -> Tensor:
    return (torch.relu, _turned)[torch.randint(2, ())](h)


def _trap(name: str, source: str, step: Step, **more: Any) -> Trap:
    uses = [_seeded(seed) for seed in range(5)]
    return Trap(name, source, lambda: _Drawing(step), lambda model: torch.zeros(4, 8).double(), uses, **more)


TRAPS = [
    _trap("a number that is drawn is added", "test-time noise: x + torch.rand(())", lambda h: h + torch.rand(())),
    _trap("a number that is drawn scales", "x * torch.rand(1)", lambda h: h * torch.rand(1), shrinks="repaired"),
    _trap("a number that is drawn in place", "torch.empty(()).normal_()", lambda h: h + torch.empty(()).normal_()),
    _trap("a number that is drawn and read", "x + torch.rand(()).item()", lambda h: h + torch.rand(()).item()),
    _trap(
        "a sample of a distribution",
        "Normal(0, 1).sample()",
        lambda h: h + torch.distributions.Normal(0.0, 1.0).sample(),
    ),
    _trap("dropout of a number, always on", "Monte Carlo dropout", lambda h: h + F.dropout(torch.ones(1), 0.5, True)),
    _trap("a branch by what is drawn", "stochastic depth at test time", _skipped),
    _trap("a function by what is drawn", "a random augmentation in forward", _chosen),
    Trap(
        "a number that is drawn with gradients",
        "noise in an adversarial attack on a network in eval mode: if torch.is_grad_enabled()",
        _DrawingWithGradients,
        lambda model: torch.zeros(4, 8).double(),
        [_seeded(seed, gradients=True) for seed in range(5)],
    ),
]


def _draws_are_constants(patch: pytest.MonkeyPatch) -> None:
    relevant = recorder.Recorder._relevant

    def without_draws(self: Any, what: Any, func: Any, tensors: Any) -> bool:
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not self._provenance.tagged
        known = any(id(t) in self._current or id(t) in self._fakes for t in tensors)
        return False if drawn and not known else relevant(self, what, func, tensors)

    patch.setattr(recorder.Recorder, "_relevant", without_draws)


ABLATIONS = [
    Ablation("what is drawn is part of the program", _draws_are_constants, "a number that is drawn is added"),
]
