"""Traps: comparisons and choices by them, whose constants depend on a number or on the other entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.traps.trap import Trap, Use, once

__all__ = ["TRAPS"]


class _Chosen(nn.Module):
    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.limit, self.fill = f, 0.3, 0.0
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)

    def set_limit(self, limit: float, fill: float) -> None:
        """Set what a schedule sets."""
        self.limit, self.fill = limit, fill

    def forward(self, x: Tensor) -> Any:
        return self.last(self.f(self, self.norm(self.first(x))))


def _later(limit: float, fill: float) -> Use:
    def use(model: Any) -> Any:
        model.set_limit(limit, fill)
        return once(2, 3, 6, 6)(model)

    return use


def _spikes(model: Any, x: Tensor) -> Tensor:
    return (x > model.limit).to(x)


def _straight_through(model: Any, x: Tensor) -> Tensor:
    return (x > model.limit).to(x) - x.detach() + x


def _filled(model: Any, x: Tensor) -> Tensor:
    return x.masked_fill(x < model.limit, model.fill)


def _chosen(model: Any, x: Tensor) -> Tensor:
    return torch.where(x > model.limit, x, x * model.fill)


def _zeros_alone(model: Any, x: Tensor) -> Tensor:
    return x * 2 + (x == 0).to(x)


def _leaky(model: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.1 * x)


def _cut(model: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0
    return y


def _by_another(model: Any, x: Tensor) -> Tensor:
    return torch.where(x.flip(1) > 0, x, 0.5)


def _trap(name: str, source: str, f: Callable[[Any, Tensor], Tensor], shrinks: bool | str = False) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=lambda: _Chosen(f),
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=[once(2, 3, 7, 9), _later(-0.4, 0.0), _later(0.2, 0.7), _later(-0.2, -0.3)],
        shrinks=shrinks,
    )


TRAPS = [
    _trap("spikes above a limit that is set later", "snntorch and spikingjelly, a threshold on a schedule", _spikes),
    _trap("a straight-through step at a limit", "binary activations, a threshold on a schedule", _straight_through),
    _trap("entries filled with a number that is set later", "masked_fill with an attribute", _filled),
    _trap("a slope that is set later", "leaky ReLU by torch.where, its slope in an attribute", _chosen),
    _trap("a number in the place of zeros", "(x == 0) to avoid a division by zero", _zeros_alone, shrinks="repaired"),
    _trap("a leaky ReLU by a choice", "torch.where(x > 0, x, 0.1 * x)", _leaky, shrinks="repaired"),
    _trap("entries cut by a mask", "x[x < 0] = 0", _cut, shrinks="repaired"),
    _trap("a choice by another channel", "torch.where with a number on one side", _by_another),
]
