"""Traps: tensors that become objects of another class, which runs no op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine.numbers.replaced_functions
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Picture(Tensor):
    """A tensor with a name of its own; ops on one return one, by way of ``as_subclass``."""


class _Cast(nn.Module):
    """Casts features between two layers."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cast = cast
        self.enter, self.middle, self.leave = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.cast(torch.relu(self.enter(x))))
        return self.leave(torch.relu(h)).as_subclass(Tensor)  # type: ignore[no-any-return]


class _Rewrapped(_Cast):
    """Makes a parameter of another one, as code that ties weights in forward does."""

    def forward(self, x: Tensor) -> Tensor:
        weight = Tensor._make_subclass(nn.Parameter, self.middle.weight)
        h = torch.relu(self.enter(x))
        return self.leave(torch.relu(nn.functional.linear(h, weight, self.middle.bias)))  # type: ignore[no-any-return]


def _one_left(model: nn.Module, seed: int) -> Masks:
    """Leave one unit of the first layer, which broadcasts against all that it would have to match; and other units."""
    first, second = torch.zeros(6), torch.zeros(5)
    first[seed], second[: 2 + seed] = 1.0, 1.0
    return {
        "enter": {"weight": first[:, None].expand(6, 4).clone(), "bias": first},
        "middle": {"weight": second[:, None].expand(5, 6).clone(), "bias": second},
    }


def _trap(name: str, source: str, make: Callable[[], nn.Module]) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.randn(2, 4, dtype=torch.float64),
        uses=[once(2, 4, seed=3), once(7, 4, seed=4)],
        masks=_one_left,
        shrinks=True,
    )


TRAPS = [
    _trap(
        "as_subclass(Tensor)", "fastai: a plain tensor of a TensorBase", lambda: _Cast(lambda h: h.as_subclass(Tensor))
    ),
    _trap(
        "as_subclass",
        "fastai, TensorBase; torchvision, tv_tensors.wrap",
        lambda: _Cast(lambda h: h.as_subclass(_Picture)),
    ),
    _trap(
        "written after as_subclass",
        "the same memory under two names",
        lambda: _Cast(lambda h: h.as_subclass(_Picture).mul_(3.0) + h),
    ),
    _trap(
        "a part as a subclass",
        "the same memory under two names",
        lambda: _Cast(lambda h: h.narrow(0, 0, 2).as_subclass(_Picture).mul_(3.0).sum(0) + h),
    ),
    _trap(
        "_make_subclass",
        "subclasses of torch.Tensor that wrap their data",
        lambda: _Cast(lambda h: Tensor._make_subclass(_Picture, h)),
    ),
    _trap(
        "a parameter of a parameter", "nn.Parameter(self.linear.weight) in forward", lambda: _Rewrapped(nn.Identity())
    ),
]


def _unfollowed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.numbers.replaced_functions, "_followed", lambda plain, position, program: plain)


ABLATIONS = [Ablation("tensors of another class", _unfollowed, "as_subclass")]
