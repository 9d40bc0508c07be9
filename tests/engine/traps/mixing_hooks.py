"""Traps: hooks of a backward pass that change a gradient by what other channels have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.verification import training
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Passes the gradient of its features through a hook."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hook = hook
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x).relu()).relu()
        if x.requires_grad:
            x.register_hook(self.hook)
        return self.head(x)  # type: ignore[no-any-return]


def _step(seed: int) -> Use:
    def use(model: nn.Module) -> Any:
        model.train()
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        model.zero_grad()
        return [out.detach(), x.grad]

    return use


def _largest(gradient: Tensor) -> Tensor:
    return gradient * (gradient >= gradient.topk(2, 1)[0][:, -1:])


def _without_median(gradient: Tensor) -> Tensor:
    return gradient - gradient.median()


def _normed(gradient: Tensor) -> Tensor:
    return gradient / (gradient.abs().max() + 1e-3)


def _clipped(gradient: Tensor) -> Tensor:
    return gradient * (3 / gradient.norm()).clamp(max=1)


def _bounded(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.5, 0.5)


_SOURCES: dict[Callable[[Tensor], Tensor], str] = {
    _largest: "meProp: only the largest entries of a gradient flow back",
    _without_median: "centralised gradients of features",
    _normed: "gradients of features divided by their largest entry",
    _clipped: "pytorch forum: clip the gradient of an activation by its norm",
}

TRAPS = [
    Trap(
        name=f"a hook that changes a gradient, {hook.__name__.lstrip('_').replace('_', ' ')}",
        source=source,
        make=lambda hook=hook: _Net(hook),
        example=lambda model: torch.zeros(2, 6, dtype=torch.float64),
        uses=[once(3, 6)],
        trains=[_step(seed) for seed in range(4)],
        shrinks=True,
        seeds=(0, 1, 2),
    )
    for hook, source in _SOURCES.items()
] + [
    Trap(
        name="a hook that changes each entry of a gradient",
        source="pytorch docs, Tensor.register_hook",
        make=lambda: _Net(_bounded),
        example=lambda model: torch.zeros(2, 6, dtype=torch.float64),
        uses=[once(3, 6)],
        trains=[_step(5)],
        shrinks=True,
    )
]


def _with_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MANY_SAMPLES", 2)


ABLATIONS = [
    Ablation(
        "small networks do a second training step, of many samples",
        _with_few_samples,
        "a hook that changes a gradient, largest",
        True,
    )
]
