"""Traps: numbers that code computes where the example leaves out an argument, or passes no items."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.flow import forward_arguments, omitted_arguments
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Features that a caller may scale, shift, or put beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        """Return what the layers before the head compute."""
        return self.body(self.stem(x).relu()).tanh()  # type: ignore[no-any-return]


class _Modulated(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.head(self.features(x) * (1 + (0 if scale is None else scale)))


class _Branch(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        gain = 1.0
        if scale is not None:
            gain = 1 + scale
        return self.head(self.features(x) * gain)


class _Variable(_Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        offset = 0 if shift is None else shift
        offset = 2 * offset + 1
        return self.head(self.features(x) / offset)


class _Method(_Net):
    def gain(self, scale: Tensor | None) -> Any:
        """Return a factor."""
        return 1 if scale is None else scale.exp()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.head(self.features(x) * self.gain(scale))


class _Weight(_Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        weight = self.head.weight * (1 + (0 if scale is None else scale[:1]))
        return F.linear(self.features(x), weight)


class _Product(_Net):
    def forward(self, x: Tensor, *gates: Tensor) -> Any:
        return self.head(self.features(x) * math.prod(gates))


class _Loop(_Net):
    def forward(self, x: Tensor, *gates: Tensor) -> Any:
        gain: Any = 1
        for gate in gates:
            gain = gain * gate
        return self.head(self.features(x) * gain)


class _Stacked(_Net):
    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.head(torch.stack([self.features(x), *others]).sum(0))


class _Joined(_Net):
    def forward(self, x: Tensor, *prompts: Tensor) -> Any:
        return self.head(torch.cat([self.features(x), *prompts]))


def _with(items: int) -> Use:
    """Return a use that passes tensors of full width behind the input."""

    def use(model: nn.Module) -> Any:
        generator = torch.Generator().manual_seed(4)
        noise = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        others = [torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(items)]
        with torch.no_grad():
            return model.eval()(noise, *others)

    return use


def _trap(name: str, source: str, make: Callable[[], nn.Module], items: int = 1) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 5, dtype=torch.float64),
        uses=[once(3, 5), *(_with(count) for count in range(1, items + 1))],
    )


TRAPS = [
    _trap("one more than a number or a scale", "DiT, modulate: x * (1 + (0 if scale is None else scale))", _Modulated),
    _trap(
        "one more than a scale, behind a condition", "FiLM: gain = 1.0; if scale is not None: gain = 1 + scale", _Branch
    ),
    _trap("a number of a number in a variable", "normalisation: x / (2 * offset + 1)", _Variable),
    _trap("a number that a method returns without a scale", "conditioning: h * self.gain(cond)", _Method),
    _trap("a weight times one more than a scale", "modulated convolutions, StyleGAN 2: weight * (style + 1)", _Weight),
    _trap("a product of no gates", "mixtures: h * math.prod(gates)", _Product, items=2),
    _trap("a product over a loop of no gates", "highways: for gate in gates: gain = gain * gate", _Loop, items=2),
    _trap("a stack with no others", "fusion: torch.stack([h, *others]).sum(0)", _Stacked, items=2),
    _trap("rows behind which there are none", "prompt tuning: torch.cat([h, *prompts])", _Joined, items=2),
]


def _no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omitted_arguments._Numbers, "_is_computed", lambda self, node: True)


def _items_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    omitted = forward_arguments._omitted

    def without_rest(bound: Any, model: nn.Module) -> set[str]:
        rest = {p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_POSITIONAL} if bound else set()
        return omitted(bound, model) - rest

    monkeypatch.setattr(forward_arguments, "_omitted", without_rest)


ABLATIONS = [
    Ablation("what is computed of a number instead of an argument", _no_further, "one more than a number or a scale"),
    Ablation("*args may have items", _items_are_recorded, "a stack with no others"),
]
