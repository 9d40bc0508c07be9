"""Traps: weights, biases and scales that the code computes, and that are as wide as what they are computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.removal import demands
from tests.engine.traps.padding import at
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]

_USES = at((1, 3, 8, 8), (2, 3, 11, 9), (3, 3, 6, 21))


class _Layer(nn.Module):
    """A layer of a function between two others; further parameters by name."""

    def __init__(self, f: Callable[[nn.Module, Tensor], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.norm, self.f = nn.BatchNorm2d(8), f
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.f(self, self.stem(x).relu()).relu())  # type: ignore[no-any-return]


class _Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        """Return a weight whose outputs have a mean of zero."""
        return weight - weight.mean(0, keepdim=True)


class _Parametrised(nn.Module):
    """A layer whose weight is centred over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        parametrize.register_parametrization(self.body, "weight", _Centred())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).relu()).relu())  # type: ignore[no-any-return]


class _Projected(nn.Module):
    """Random features, with a matrix that is drawn again now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.register_buffer("matrix", torch.randn(8, 4))

    def draw(self) -> None:
        """Draw other features."""
        self.matrix = torch.randn(8, 4).to(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).sigmoid().movedim(1, -1) @ self.matrix
        return self.head(torch.cat([y.sin(), y.cos()], -1).movedim(-1, 1))  # type: ignore[no-any-return]


class _Equalised(nn.Module):
    """Scales its weight by the number of inputs at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.randn(8))
        self.register_buffer("window", torch.ones(4))

    def draw(self) -> None:
        """Take a longer window."""
        self.window = torch.ones(9).to(self.window)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * math.sqrt(2 / (self.weight.shape[1] * self.weight.shape[2] * self.weight.shape[3]))
        return F.conv2d(x, weight, self.bias, padding=1)


class _EqualisedByHeight(_Equalised):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * math.sqrt(2 / (self.weight.shape[1] * x.shape[2])), self.bias, padding=1)


class _EqualisedByWindow(_Equalised):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * math.sqrt(2 / (self.weight.shape[1] * self.window.shape[0]))
        return F.conv2d(x, weight, self.bias, padding=1) * self.window.mean()


def _between(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), layer(), nn.ReLU(), nn.Conv2d(8, 4, 1))


def _longer(model: nn.Module) -> Any:
    model.get_submodule("2").draw()  # type: ignore[operator]
    return _USES[0](model)


def _rotated(m: nn.Module, x: Tensor) -> Tensor:
    skew = m.angles.tril(-1)
    return F.conv2d(x, (m.base @ torch.matrix_exp(skew - skew.mT))[..., None, None])


def _rolled(m: nn.Module, x: Tensor) -> Tensor:
    return F.conv2d(x, m.body.weight.roll(1, 1), m.body.bias)


def _sorted_scale(m: nn.Module, x: Tensor) -> Tensor:
    n, scale, shift = m.norm, m.norm.weight.softmax(0), m.norm.bias.sort().values
    return F.batch_norm(m.body(x), n.running_mean, n.running_var, scale, shift)


def _shuffled_first(m: nn.Module, x: Tensor) -> Tensor:
    return F.pixel_shuffle(m.places, 2).exp().mean() * x * m.places


def _trap(
    name: str, source: str, f: Callable[[nn.Module, Tensor], Tensor], *, shrinks: bool = False,
    **shapes: tuple[int, ...],
) -> Trap:  # fmt: skip
    return _of(name, source, lambda: _Layer(f, shapes), shrinks=shrinks)


def _of(
    name: str, source: str, make: Callable[[], nn.Module], *, shrinks: bool = False, uses: Sequence[Use] = _USES
) -> Trap:
    def example(model: nn.Module) -> Tensor:
        return torch.zeros(2, 3, 8, 8, dtype=torch.float64)

    return Trap(name=name, source=source, make=make, example=example, uses=uses, shrinks=shrinks)


TRAPS = [
    _trap("a weight that is rotated", "torch.nn.utils.parametrizations.orthogonal: base @ matrix_exp(skew)", _rotated,
          base=(8, 8), angles=(8, 8)),
    _trap("a weight that is rolled", "circular convolutions: weight.roll(1, 1)", _rolled, shrinks=True),
    _trap("a scale that is normalised and a shift that is sorted", "F.batch_norm(x, m, v, weight.softmax(0), bias)",
          _sorted_scale, shrinks=True),
    _trap("a scale that is shuffled before it is multiplied", "F.pixel_shuffle(scale, 2).mean()", _shuffled_first,
          places=(1, 8, 1, 1)),
    _of("a weight that is centred over its outputs", "torch.nn.utils.parametrize: a user's parametrization",
        _Parametrised, shrinks=True),
    _of("a weight that is scaled by its own sizes", "equalised learning rates: ProGAN, computed at each call",
        _between(_Equalised), shrinks=True),
    _of("a weight that is scaled by its own size and the input's", "a factor that follows the resolution",
        _between(_EqualisedByHeight)),
    _of("a weight that is scaled by its own size and a buffer's", "a window that a method replaces by a longer one",
        _between(_EqualisedByWindow), uses=[*_USES, _longer]),
    _of("a projection that is drawn again", "Performer, random Fourier features: redraw_projection_matrix", _Projected),
]  # fmt: skip


def _follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "_imposed", lambda self, value, touched: False)


def _all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    full = lambda self, c: torch.ones(c.groups * c.inputs, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(Constants, "settled_inputs", full)


def _unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "fix_unclaimed", lambda self, node: None)


def _sizes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demands, "_is_the_same_in_all_calls", lambda structure, leaf: True)


ABLATIONS = [
    Ablation("a factor that follows other sizes stays", _sizes_stay,
             "a weight that is scaled by its own size and the input's", repaired=True),
    Ablation("a buffer that code replaces may have another size", _sizes_stay,
             "a weight that is scaled by its own size and a buffer's", repaired=True),
    Ablation("what is computed is as wide as what computes it", _follows, "a weight that is rotated"),
    Ablation("what has no number is not folded", _all_numbers, "a weight that is centred over its outputs"),
    Ablation("a dimension without slots at its first reader is fixed", _unclaimed,
             "a scale that is shuffled before it is multiplied", repaired=True),
]  # fmt: skip
