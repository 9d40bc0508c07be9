"""Traps: masks, gates and coefficients that no code of the model sets, and that a callback does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import mutable_state
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


def _after(change: Callable[[Any], object], *shape: int, train: bool = False) -> Use:
    """Return a use that sets something on the network first, as a callback would."""

    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            change(model)
        if not train:
            return once(*shape)(model)
        model.train()
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return model(noise).detach()

    return use


def _zeros(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.zeros(shape, dtype=torch.float64)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class _Masked(_Net):
    """Features times a mask of zeros and ones."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        mask = torch.arange(8) % 2
        self.register_buffer("mask", mask if form == "whole numbers" else mask.double())
        if form == "selects":
            self.mask = mask.bool()
        if form == "weight":
            self.register_buffer("mask", mask.double()[None].repeat(8, 1), persistent=False)
        if form == "attribute":
            del self.mask
            self.mask = mask.double()

    def forward(self, x: Tensor) -> Tensor:
        masked = {"weight": self._weight, "selects": self._selects, "inverse": self._inverse}.get(
            self.form, self._product
        )
        return self.head(masked(self.stem(x).relu()))  # type: ignore[no-any-return]

    def _weight(self, x: Tensor) -> Tensor:
        return F.linear(x, self.body.weight * self.mask).relu()

    def _selects(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.body(x), 0.0)

    def _inverse(self, x: Tensor) -> Tensor:
        return self.body(x) * (1 - self.mask)  # type: ignore[no-any-return]

    def _product(self, x: Tensor) -> Tensor:
        return self.body(x).relu() * self.mask  # type: ignore[no-any-return]


class _Statistics(_Net):
    """Features less a mean that somebody fills in, zero in half of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.0, 0.3] * 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(self.stem(x).relu()) * self.mean).tanh())  # type: ignore[no-any-return]


class _Blend(_Net):
    """A layer that fades in by a number that a callback moves."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head((1 - self.alpha) * self.body(x) + self.alpha * x)  # type: ignore[no-any-return]


class _Scaled(_Blend):
    """The number is made a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        gate = torch.full_like(x, self.alpha)
        return self.head(x + gate * self.body(x))  # type: ignore[no-any-return]


class _Tensor(_Blend):
    """The number is made a tensor by its value."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(x + torch.tensor(self.alpha, dtype=x.dtype) * self.body(x))  # type: ignore[no-any-return]


class _Skipped(_Blend):
    """Nothing runs while the number is zero."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        if self.alpha > 0:
            x = x + self.alpha * self.body(x)
        return self.head(x)  # type: ignore[no-any-return]


class _SkippedInTraining(_Blend):
    """A branch that a schedule opens, in train mode only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        if self.training and self.alpha:
            x = x + self.alpha * self.body(x)
        return self.head(x)  # type: ignore[no-any-return]


class _OfTheClass(_Net):
    """A default of the class, which an instance overrides."""

    alpha = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(torch.lerp(x, self.body(x), self.alpha))  # type: ignore[no-any-return]


class _Pattern(_Net):
    """A table that selects channels in another order stays known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([3, 0, 1, 2, 7, 6, 5, 4]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).relu())[:, self.order].relu())  # type: ignore[no-any-return]


def _set(name: str, value: float) -> Callable[[Any], object]:
    return lambda model: setattr(model, name, value)


def _fill(name: str, value: float) -> Callable[[Any], object]:
    """Return what fills a tensor that no code of this file names: that would tell the engine."""
    return lambda model: getattr(model, name).fill_(value)


_MASKS = {
    "times features": "google-research/rigl: layers keep a mask buffer, which a schedule outside of the model moves",
    "whole numbers": "torch docs, register_buffer: a mask of integers, set by a callback",
    "selects": "torch.where(self.mask, x, 0): diffusers and timm token masks, set from outside",
    "weight": "movement pruning: F.linear(x, weight * self.mask), the mask belongs to a scheduler",
    "inverse": "PackNet and Piggyback: features times (1 - mask)",
    "attribute": "a mask in a plain attribute, as state that no checkpoint holds",
}

TRAPS = [
    *(
        Trap(
            name=f"a mask of zeros and ones that is opened later, {form}",
            source=source,
            make=lambda form=form: _Masked(form),
            example=_zeros(2, 6),
            uses=[once(3, 6), _after(_fill("mask", form != "inverse"), 3, 6)],
            shrinks=True,
        )
        for form, source in _MASKS.items()
    ),
    Trap(
        name="factors with some zeros, set later",
        source="pytorch docs, register_buffer: normalisation statistics loaded after construction",
        make=_Statistics,
        example=_zeros(2, 6),
        uses=[once(3, 6), _after(_fill("mean", 0.7), 3, 6)],
        shrinks=True,
    ),
    *(
        Trap(
            name=f"a number in an attribute that nobody but a callback sets, {name}",
            source=source,
            make=lambda kind=kind, value=value: kind(value),
            example=_zeros(2, 6),
            uses=[once(3, 6), _after(_set("alpha", 0.4), 3, 6)],
            trains=[_after(_set("alpha", 0.4), 3, 6, train=True)],
            shrinks=True,
        )
        for name, kind, value, source in (
            ("blend of zero", _Blend, 0.0, "progressive GAN: alpha moves from 0 to 1 between resolutions"),
            ("blend of one", _Blend, 1.0, "progressive GAN: alpha is 1 once a resolution has settled"),
            ("filled", _Scaled, 0.0, "ReZero and SkipInit: a gate that a warm-up raises from zero"),
            ("made a tensor", _Tensor, 0.0, "fastai callbacks: learn.model.alpha = …"),
            ("branch", _Skipped, 0.0, "ControlNet conditioning_scale: zero skips the branch"),
            ("branch while training", _SkippedInTraining, 0.0, "DropBlock and consistency schedules set p per step"),
        )
    ),
    Trap(
        name="a number of the class that an instance overrides",
        source="fairseq and detectron2 models: class attributes as defaults",
        make=_OfTheClass,
        example=_zeros(2, 6),
        uses=[once(3, 6), _after(_set("alpha", 0.4), 3, 6)],
        shrinks=True,
    ),
    Trap(
        name="an order of channels in a buffer",
        source="ShuffleNet and Glow ports: a permutation as a buffer",
        make=_Pattern,
        example=_zeros(2, 6),
        uses=[once(3, 6)],
        shrinks=True,
    ),
]


def _by_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(tensor: Tensor, derived: bool) -> bool:
        return tensor.numel() <= 1 or (not derived and bool((tensor == tensor.reshape(-1)[0]).all()))

    monkeypatch.setattr(mutable_state, "_suggests_change", uniform)


def _nothing_settable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutable_state, "coefficients", lambda module: iter(()))


ABLATIONS = [
    Ablation(
        "a mask of zeros and ones is an input", _by_numbers_alone,
        "a mask of zeros and ones that is opened later, weight", True,
    ),
    Ablation(
        "floats of zero and one in attributes vary", _nothing_settable,
        "a number in an attribute that nobody but a callback sets, blend of zero",
    ),
]  # fmt: skip
