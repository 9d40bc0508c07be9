"""Traps: arguments that code asks for in functions inside of forward, in loops, and where it uses weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.flow import control_flow
from engine.removal.homes import Homes
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Function(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        def scaled(features: Tensor) -> Tensor:
            return features if scale is None else features * scale

        return self.leave(scaled(self.features(x)))  # type: ignore[no-any-return]


class _Lambda(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        scaled = lambda features: features if scale is None else features * scale  # noqa: E731
        return self.leave(scaled(self.features(x)))  # type: ignore[no-any-return]


class _Comprehension(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.features(x)
        return self.leave(torch.stack([h if scale is None else h * scale for _ in range(2)]).sum(0))  # type: ignore[no-any-return]


class _Generator(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.features(x)

        def parts() -> Iterator[Tensor]:
            yield h
            if scale is not None:
                yield h * scale

        return self.leave(sum(parts()))  # type: ignore[no-any-return]


class _Attribute(Net):
    """A function inside asks an attribute of the module that a method sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = False

    def forward(self, x: Tensor) -> Tensor:
        def scaled(features: Tensor) -> Tensor:
            return features * 0.3 if self.scaling else features

        return self.leave(scaled(self.features(x)))  # type: ignore[no-any-return]

    def set_scaling(self) -> None:
        """Scale from now on."""
        self.scaling = True


class _Unset(Net):
    """Has no function until a method sets one."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.function is not None:
            h = self.function(h)
        return self.leave(h)  # type: ignore[no-any-return]

    def set_function(self) -> None:
        """Use one from now on."""
        self.function = torch.sigmoid


class _Else(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.features(x)
        for _ in range(2):
            if scale is None:
                break
        else:
            h = h * scale
        return self.leave(h)  # type: ignore[no-any-return]


class _Weight(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        weight = self.leave.weight
        if scale is not None:
            weight = weight * scale
        return F.linear(self.features(x), weight, self.leave.bias)


class _Bias(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        bias = self.leave.bias
        if scale is not None:
            bias = bias * scale
        return F.linear(self.features(x), self.leave.weight, bias)


class _OwnBias(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        bias = self.enter.bias
        if scale is not None:
            bias = bias + scale
        return self.leave(torch.relu(F.linear(x, self.enter.weight, bias)) + 0.5)  # type: ignore[no-any-return]


def _switched(model: Any) -> Any:
    model.set_scaling()
    return called(noise(3))(model)


def _with_function(model: Any) -> Any:
    model.set_function()
    return called(noise(3))(model)


def _trap(name: str, source: str, make: type[nn.Module], use: Use | None = None) -> Trap:
    scaled = called(noise(3), scale=torch.tensor(0.3, dtype=torch.float64))
    return Trap(name, source, make, lambda model: noise(2), [called(noise(3)), scaled if use is None else use])


TRAPS = [
    _trap("an argument in a function inside", "def scaled(h): h if scale is None else h * scale", _Function),
    _trap("an argument in a lambda function", "lambda h: h if scale is None else h * scale", _Lambda),
    _trap("an argument in a comprehension", "[h if scale is None else h * scale for …]", _Comprehension),
    _trap("an argument in a generator", "if scale is not None: yield h * scale", _Generator),
    _trap("an attribute in a function inside", "features * 0.3 if self.scaling else features", _Attribute, _switched),
    _trap("a function that is not set yet", "if self.fn is not None: h = self.fn(h)", _Unset, _with_function),
    _trap("an argument behind a loop", "for …: if scale is None: break … else:", _Else),
    _trap("a weight that is scaled on demand", "weight = weight * scale; F.linear(x, weight)", _Weight),
    _trap("a bias that is scaled on demand", "bias = bias * scale; F.linear(x, weight, bias)", _Bias),
    _trap("a bias that is shifted on demand", "bias = bias + shift; F.linear(x, weight, bias)", _OwnBias),
]


def _nothing_around(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UntakenBranch, "enclosing_variables", lambda self: set())


def _never_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control_flow, "_is_left", lambda loop: False)


def _never_set(patch: pytest.MonkeyPatch) -> None:
    lacks = UntakenBranch._lacks_attribute
    patch.setattr(UntakenBranch, "_lacks_attribute", lambda self, nodes, _: lacks(self, nodes, lambda name: True))


def _weights_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Constants, "settled_inputs", lambda self, c: torch.ones(c.groups * c.inputs, dtype=torch.bool))
    patch.setattr(Homes, "changes", lambda self, value: False)


ABLATIONS = [
    Ablation("variables around a function may be others", _nothing_around, "an argument in a function inside"),
    Ablation("an attribute that is None may be set", _never_set, "a function that is not set yet"),
    Ablation("what stands behind a loop depends on how it ends", _never_left, "an argument behind a loop"),
    Ablation(
        "weights that other code changes take no constants", _weights_settled, "a weight that is scaled on demand"
    ),
]
