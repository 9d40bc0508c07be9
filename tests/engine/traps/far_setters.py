"""Traps: numbers that code sets in another file than the one that reads them, and global numbers."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.source.reassigned import Reassigned
from tests.engine.traps import far_numbers
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Layer(far_numbers.OfLayer):
    def set_number(self, number: float) -> None:
        """Set the number of a layer that another file defines."""
        self.clip.far_low = number


class _OfTorch(nn.Module):
    """Has a layer of torch that reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.clip, self.leave = nn.Linear(4, 8), nn.Hardtanh(-2.0, 3.0), nn.Linear(8, 3)

    def set_number(self, number: float) -> None:
        """Set the number of the layer."""
        self.clip.min_val = number

    def forward(self, x: Tensor) -> Any:
        """Clip features by the layer."""
        return self.leave(self.clip(self.enter(x)))


class _Base(far_numbers.OfInstance):
    def set_number(self, number: float) -> None:
        """Set a number that only the base class reads."""
        self.far_bound = number


class _Schedule(far_numbers.OfInstance):
    """Anneals a number that only the base class reads."""

    def forward(self, x: Tensor) -> Any:
        """Clip features, less and less in train mode."""
        if self.training:
            self.far_bound = self.far_bound * 0.5 + 0.5
        return super().forward(x)

    def set_number(self, number: float) -> None:
        """Run in train mode until the number is larger."""
        while self.train().far_bound < number:
            self(noise(2))


class _Class(far_numbers.OfClass):
    def set_number(self, number: float) -> None:
        """Hide a number of the class."""
        self.far_floor = number


class _Config(far_numbers.OfConfig):
    def __init__(self) -> None:
        super().__init__(types.SimpleNamespace(far_minimum=-2.0))

    def set_number(self, number: float) -> None:
        """Set a number of the configuration."""
        self.config.far_minimum = number


_LIMIT = -2.0


def _set_limit(number: float) -> None:
    global _LIMIT
    _LIMIT = number


class _Global(_OfTorch):
    def forward(self, x: Tensor) -> Any:
        """Clip features by a global number."""
        return self.leave(torch.clamp(self.enter(x), min=_LIMIT))


class _FarGlobal(far_numbers.OfGlobal):
    def set_number(self, number: float) -> None:
        """Set a global number of another file."""
        far_numbers.FAR_LIMIT = number


class _FarAttribute(_OfTorch):
    def forward(self, x: Tensor) -> Any:
        """Clip features by a global number of another file."""
        return self.leave(torch.clamp(self.enter(x), min=far_numbers.FAR_LIMIT))


def _set_far_limit(number: float) -> None:
    far_numbers.FAR_LIMIT = number


@contextmanager
def _restoring_globals() -> Iterator[None]:
    yield
    _set_limit(-2.0)
    _set_far_limit(-2.0)


def _after(turn: Callable[[Any], None]) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad(), _restoring_globals():
            turn(model)
            return model.eval()(noise(5))

    return use


def _set_own(model: Any) -> None:
    model.set_number(0.5)


_WAYS: list[tuple[str, str, Callable[[], nn.Module], Use]] = [
    ("a number of a layer of another file", "model.set_threshold(), a layer of a package", _Layer, _after(_set_own)),
    ("a number of a layer of torch", "self.act.min_val = low; nn.Hardtanh of a quantized network", _OfTorch,
     _after(_set_own)),
    ("a number that a base class reads", "a subclass with a setter", _Base, _after(_set_own)),
    ("a number that a subclass anneals", "a schedule in the forward of a subclass", _Schedule, _after(_set_own)),
    ("a number of a class that an instance hides", "a class attribute as a default", _Class, _after(_set_own)),
    ("a number of a configuration of another file", "self.config.x = y, transformers", _Config, _after(_set_own)),
    ("a global number", "global THRESHOLD, as set_grad_enabled has", _Global, _after(lambda m: _set_limit(0.5))),
    ("a global number of another file", "layers.THRESHOLD = x", _FarGlobal, _after(_set_own)),
    ("a global number that is read by way of its file", "layers.THRESHOLD", _FarAttribute,
     _after(lambda m: _set_far_limit(0.5))),
]  # fmt: skip


TRAPS = [
    Trap(name=name, source=source, make=make, example=lambda model: noise(3), uses=[called(noise(4)), use])
    for name, source, make, use in _WAYS
]


def _none_of_attributes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reassigned, "attribute", lambda self, owner, name: False)


def _none_of_globals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reassigned, "variable", lambda self, python_module, name: False)


ABLATIONS = [
    Ablation("other files set numbers", _none_of_attributes, "a number of a layer of another file"),
    Ablation("code sets numbers of torch's layers", _none_of_attributes, "a number of a layer of torch"),
    Ablation("code sets global numbers", _none_of_globals, "a global number"),
]
