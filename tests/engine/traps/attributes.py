"""Traps: numbers and switches in attributes, which a method, a callback or the call itself sets later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives.attributes import Settings
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

_SHAPE = (2, 3, 6, 6)


def _zeros(model: nn.Module) -> Tensor:
    return torch.zeros(_SHAPE, dtype=torch.float64)


def _after(change: Callable[[Any], None]) -> Use:
    """Return a use that calls the network, sets something, and calls it again."""

    def use(model: nn.Module) -> Any:
        first = once(*_SHAPE)(model)
        change(model)
        return [first, once(*_SHAPE, seed=2)(model), once(3, 3, 5, 7)(model)]

    return use


class _Net(nn.Module):
    """A stem, a body and a head; what lies between is the trap's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.inner, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def branch(self, x: Tensor) -> Tensor:
        """Return what an attribute scales, or switches on."""
        return self.inner(self.body(x).relu())  # type: ignore[no-any-return]


class _Temperature(_Net):
    """Soft choices, sharper from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.branch(self.stem(x).relu()) / self.temperature))  # type: ignore[no-any-return]

    def anneal(self) -> None:
        """Lower the temperature."""
        self.temperature *= 0.6


class _Growing(nn.Module):
    """A new resolution that fades in."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.old, self.new, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        y = self.new(x).relu()
        if self.alpha < 1:
            y = self.alpha * y + (1 - self.alpha) * self.old(x).relu()
        return self.head(y)  # type: ignore[no-any-return]

    def grow(self, step: float) -> None:
        """Go on to the new resolution."""
        self.alpha = min(self.alpha + step, 1.0)


class _Survival(_Net):
    """Residual branches are scaled by the share of calls that they survive."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head((y + (1 - self.drop_rate) * self.branch(y)).relu())  # type: ignore[no-any-return]

    def set_drop_rate(self, rate: float) -> None:
        """Follow the schedule."""
        self.drop_rate = rate


class _ReZero(_Net):
    """A gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(y + self.gate * self.branch(y))  # type: ignore[no-any-return]


class _OpenGate:
    """A callback that opens the gate."""

    def on_train_epoch_end(self, module: Any) -> None:
        """Open it a bit."""
        module.gate = 0.7


class _WarmUp(_Net):
    """A branch whose scale grows with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        scale = min(1.0, self.step / 2)
        self.step += 1
        return self.head(y + scale * self.branch(y))  # type: ignore[no-any-return]


class _Variational(nn.Module):
    """A divergence whose weight is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)
        self.decoder = nn.Conv2d(6, 3, 1)
        self.beta = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.encoder(x).relu()
        mean, spread = self.mean(y), self.spread(y)
        divergence = 0.5 * (mean**2 + spread.exp() - spread - 1)
        return self.decoder(mean), self.beta * divergence.mean()

    def on_epoch(self, epoch: int) -> None:
        """Follow the schedule of the weight."""
        self.beta = min(1.0, epoch / 4)


class _Flag(_Net):
    """A part that is switched on when training has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.training_started = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.training_started:
            y = y + self.branch(y)
        return self.head(y)  # type: ignore[no-any-return]

    def start(self) -> None:
        """Switch it on."""
        self.training_started = True


class _Distilled(_Net):
    """Two heads, averaged but while it is distilled."""

    def __init__(self) -> None:
        super().__init__()
        self.distilled_training = False
        self.other = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.branch(self.stem(x).relu())
        one, other = self.head(y), self.other(y)
        return (one, other) if self.distilled_training else (one + other) / 2

    def set_distilled_training(self, enable: bool = True) -> None:
        """Return both."""
        self.distilled_training = enable


class _Chosen(_Net):
    """Which features come out is a switch; all of them are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.features_only = False

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x).relu()
        logits = self.head(self.branch(features))
        return features[:, :4] * 2 if self.features_only else logits

    def enable_features(self) -> None:
        """Give features."""
        self.features_only = True


class _Levels(_Net):
    """A finer level from the second stage on."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.finest = 0, 3

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.level >= self.finest:
            y = self.branch(y)
        return self.head(y + self.level)  # type: ignore[no-any-return]

    def set_level(self, level: int) -> None:
        """Go to another level."""
        self.level = level


class _Function(_Net):
    """Uses one function or another, by a number that a method sets."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.relu, torch.sigmoid)[self.stage](self.stem(x)))  # type: ignore[no-any-return]

    def set_stage(self, stage: int) -> None:
        """Go to another stage."""
        self.stage = stage


def _declared(model: nn.Module) -> dict[str, Any]:
    return {"constants": ["gate"]}


def _called_again(model: Any) -> None:
    once(*_SHAPE, seed=3)(model)


TRAPS = [
    Trap(
        name="a temperature that a method anneals",
        source="Gumbel softmax (arXiv 1611.01144), the schedule of facebookresearch/fairseq's quantisers",
        make=_Temperature,
        example=_zeros,
        uses=[_after(_Temperature.anneal)],
        shrinks=True,
    ),
    Trap(
        name="a resolution that fades in from zero",
        source="progressive growing of GANs (arXiv 1710.10196)",
        make=lambda: _Growing(0.0),
        example=_zeros,
        uses=[_after(lambda model: model.grow(0.4)), _after(lambda model: model.grow(1.0))],
        shrinks=True,
    ),
    Trap(
        name="a resolution that has faded in",
        source="progressive growing of GANs (arXiv 1710.10196), stages that begin anew",
        make=lambda: _Growing(1.0),
        example=_zeros,
        uses=[_after(lambda model: model.grow(-0.6))],
        shrinks=True,
    ),
    Trap(
        name="a schedule of stochastic depth",
        source="stochastic depth (arXiv 1603.09382), which scales by the survival rate in eval mode",
        make=_Survival,
        example=_zeros,
        uses=[_after(lambda model: model.set_drop_rate(0.3))],
        shrinks=True,
    ),
    Trap(
        name="a gate in a number that a callback opens",
        source="ReZero (arXiv 2003.04887) with a schedule in a callback",
        make=_ReZero,
        example=_zeros,
        uses=[_after(_OpenGate().on_train_epoch_end)],
        shrinks=True,
    ),
    Trap(
        name="a scale that counts calls",
        source="warm-up of auxiliary branches by a step counter in the module",
        make=_WarmUp,
        example=_zeros,
        uses=[_after(_called_again)],
        shrinks=True,
    ),
    Trap(
        name="a divergence with a weight of zero",
        source="annealed weights of the divergence (arXiv 1511.06349)",
        make=_Variational,
        example=_zeros,
        uses=[_after(lambda model: model.on_epoch(3))],
        shrinks=True,
    ),
    Trap(
        name="a flag that says that training has begun",
        source="lazily enabled parts, `self.training_started`",
        make=_Flag,
        example=_zeros,
        uses=[_after(_Flag.start)],
        shrinks=True,
    ),
    Trap(
        name="a toggle of what is returned",
        source="huggingface/pytorch-image-models, `set_distilled_training`",
        make=_Distilled,
        example=_zeros,
        uses=[_after(_Distilled.set_distilled_training)],
        shrinks=True,
    ),
    Trap(
        name="a toggle of which features are returned",
        source="`enable_features`, `features_only` switches of backbones",
        make=_Chosen,
        example=_zeros,
        uses=[_after(_Chosen.enable_features)],
        shrinks=True,
    ),
    Trap(
        name="a level with a threshold",
        source="coarse-to-fine schedules (arXiv 2104.06405)",
        make=_Levels,
        example=_zeros,
        uses=[_after(lambda model: model.set_level(3)), _after(lambda model: model.set_level(2))],
        shrinks=True,
    ),
    Trap(
        name="a function by a number that a method sets",
        source="activations that change in stages of training",
        make=_Function,
        example=_zeros,
        uses=[_after(lambda model: model.set_stage(1))],
    ),
    Trap(
        name="a gate that is declared to be constant",
        source="ReZero (arXiv 2003.04887)",
        make=_ReZero,
        example=_zeros,
        uses=[once(*_SHAPE), once(3, 3, 5, 7)],
        trace=_declared,
        shrinks=True,
    ),
]


def _as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Settings, "record", lambda self, guards, *further: [])


ABLATIONS = [
    Ablation("attributes that code sets later are recorded at other values", _as_they_are, trap)
    for trap in ("a function by a number that a method sets",)
]
