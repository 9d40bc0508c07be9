"""Traps: code that did not run combines features with other tensors, or calls functions by the names of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from torch import Tensor, nn

from engine.flow import effects
from engine.flow.effects import Functions
from engine.unrecorded import unreached, untaken
from tests.engine.traps.trap import Ablation, Trap, not_contiguous, once

__all__ = ["ABLATIONS", "TRAPS"]

_Step = Callable[["_Net", Tensor, Tensor, Tensor], Tensor]


class _Net(nn.Module):
    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.last, self.head = nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 2)
        self.gain, self.same = nn.Parameter(torch.ones(8, 1, 1)), nn.Identity()
        self.gains = _Gains()
        self.step = step

    def forward(self, x: Tensor) -> Any:
        y = self.step(self, self.first(x), self.second(x), x)
        return self.head(self.last(y).mean((2, 3)))


def _multiplied(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * z.sigmoid()
    return y


def _scaled(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * net.gain
    return y


def _averaged(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * z.mean((1, 2, 3), keepdim=True).sigmoid() * x.mean()
    return y


def _added_again(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y + net.second(x)
    return y


_GAIN = torch.linspace(0.5, 2, 8, dtype=torch.float64).view(8, 1, 1)


class _Gains:
    """Holds a tensor of as many numbers as there are channels, and returns it."""

    def __init__(self) -> None:
        self.own = _GAIN

    def mean(self) -> Tensor:
        """Return it."""
        return self.own


def _by_a_global(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * _GAIN
    return y


def _by_an_attribute(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * net.gains.own
    return y


def _by_a_method(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y * net.gains.mean()
    return y


def _by_another_branch(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    gain: Any = 1.0
    if not x.is_contiguous():
        gain = net.gain
    z.sum()
    if not x.is_contiguous():
        y = y * gain
    return y


def _by_an_unset_variable(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        gain = [_GAIN]
    z.sum()
    if not x.is_contiguous():
        y = y * gain[0]
    return y


def _typed(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = z.type(y.dtype)
    return y


def _called_same(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y + net.same(z)
    return y


def _counted(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = y + torch.isfinite(z).to(y)
    return y


def _filled(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = TF.pad(y, [1, 1], 5)
    return y


class _Flips:
    @staticmethod
    def relu(x: Tensor) -> Tensor:
        return x.flip(1)


functional = _Flips()


def _by_a_name_of_torch(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = functional.relu(y)
    return y


def _by_a_variable(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    flips = _Flips()
    if not x.is_contiguous():
        y = flips.relu(y)
    return y


def _by_torch(net: _Net, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        y = F.relu(y)
    return y


def _trap(name: str, step: _Step, shrinks: bool | str = False) -> Trap:
    return Trap(
        name=name,
        source="a branch on a property of a tensor that no recording changes",
        make=functools.partial(_Net, step),
        example=lambda model: torch.zeros(2, 3, 6, 6, dtype=torch.float64),
        uses=[once(1, 3, 5, 7), not_contiguous(2, 3, 6, 6), not_contiguous(1, 3, 5, 7)],
        shrinks=shrinks,
        seeds=(1, 2, 3),
    )


TRAPS = [
    _trap("features that are multiplied by others in another layout", _multiplied),
    _trap("features that are multiplied by a parameter in another layout", _scaled),
    _trap("features that are multiplied by an average in another layout", _averaged),
    _trap("features that are multiplied by a global tensor in another layout", _by_a_global),
    _trap("features that are multiplied by a tensor of an object in another layout", _by_an_attribute),
    _trap("features that are multiplied by an object's result in another layout", _by_a_method),
    _trap("features that are multiplied by what another branch sets in another layout", _by_another_branch),
    _trap("features that are multiplied by a variable that no run has set in another layout", _by_an_unset_variable),
    _trap("results of a layer that are added in another layout", _added_again),
    _trap("other features in a dtype in another layout", _typed),
    _trap("other features by way of a module in another layout", _called_same),
    _trap("finite entries in another layout", _counted),
    _trap("a picture that is padded with a number in another layout", _filled),
    _trap("a function with the name of one of torch's in another layout", _by_a_name_of_torch),
    _trap("a function of an object in another layout", _by_a_variable),
    _trap("a function of torch in another layout", _by_torch, shrinks="repaired"),
]


def _sizes_may_differ(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "keep_beside_operands", lambda *arguments: None)


def _all_names_are_of_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Functions, "within", lambda self, space, code: self)


def _objects_are_of_callers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(untaken, "set_from_globals", lambda tree, code: set[str]())


def _calls_ask_for_metadata(patch: pytest.MonkeyPatch) -> None:
    names = {"isfinite", "type"}
    own = effects._calls_for_metadata

    def asks(call: Any) -> bool:
        return getattr(call.func, "attr", "") in names or own(call)

    patch.setattr(effects, "_calls_for_metadata", asks)


ABLATIONS = [
    Ablation(
        "what is combined with a tensor keeps its sizes",
        _sizes_may_differ,
        "features that are multiplied by others in another layout",
        True,
    ),
    Ablation(
        "a function of torch is one of its Python modules",
        _all_names_are_of_torch,
        "a function with the name of one of torch's in another layout",
        True,
    ),
    Ablation(
        "an object that code creates is none of the caller's",
        _objects_are_of_callers,
        "a function of an object in another layout",
        True,
    ),
    Ablation(
        "a conversion reads its tensor",
        _calls_ask_for_metadata,
        "other features in a dtype in another layout",
        True,
    ),
]
