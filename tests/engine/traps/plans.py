"""Traps: plain objects, and modules without ops, that pick one of several features by what a size decides."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

from engine.flow import argument_flow
from engine.unrecorded import chosen_numbers
from tests.engine.traps.trap import Ablation, Trap, at_other_length

__all__ = ["ABLATIONS", "TRAPS"]


class _Kept:
    def __init__(self, level: int) -> None:
        self.level = level


class _Property:
    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def level(self) -> int:
        return 1 if self.size == 77 else 0


class _Cached(_Property):
    @functools.cached_property
    def level(self) -> int:  # type: ignore[override]
        return 1 if self.size == 77 else 0


class _Built:
    def __init__(self, size: int) -> None:
        self.level = self.pick(size)

    @classmethod
    def pick(cls, size: int) -> int:
        return 1 if size == 77 else 0


class _Named(_Kept):
    @classmethod
    def of(cls, size: int) -> _Named:
        return cls(1 if size == 77 else 0)


class _New:
    level: int

    def __new__(cls, size: int) -> _New:
        plan = object.__new__(cls)
        plan.level = 1 if size == 77 else 0
        return plan


class _Called:
    level = 0

    def __call__(self, size: int) -> _Called:
        self.level = 1 if size == 77 else 0
        return self


class _Choice(nn.Module):
    """Returns one of two features, and computes nothing."""

    def forward(self, one: Tensor, other: Tensor, level: int) -> Tensor:
        return (one, other)[level]


class _Net(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)
        self.choice, self.inside = _Choice(), inside

    def forward(self, x: Tensor) -> Any:
        one, other, plan = self.one(x).relu(), self.other(x).sigmoid(), self.plan(x)
        if self.inside:
            return self.head((one, other)[plan.level])
        return self.head(self.choice(one, other, plan.level))

    def plan(self, x: Tensor) -> Any:
        raise NotImplementedError


class _OfKept(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Kept(1 if len(x) == 77 else 0)


class _OfProperty(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Property(len(x))


class _OfCached(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Cached(len(x))


class _OfBuilt(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Built(len(x))


class _OfNamed(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Named.of(len(x))


class _OfNew(_Net):
    def plan(self, x: Tensor) -> Any:
        return _New(len(x))


class _OfCalled(_Net):
    def plan(self, x: Tensor) -> Any:
        return _Called()(len(x))


def _trap(name: str, kind: type[_Net], inside: bool) -> Trap:
    where = "in place" if inside else "in a module without ops"
    source = "configurations and schedules in objects: the level follows from the length"
    return at_other_length(f"{name}, {where}", source, functools.partial(kind, inside), seeds=(1,))


_KINDS = {
    "a level that an object keeps": _OfKept,
    "a level that a property computes": _OfProperty,
    "a level that a cached property computes": _OfCached,
    "a level that a class method computes": _OfBuilt,
    "a level in an object of a class method": _OfNamed,
    "a level that is set in a constructor of objects": _OfNew,
    "a level that an object sets when it is called": _OfCalled,
}
TRAPS = [_trap(name, kind, inside) for name, kind in _KINDS.items() for inside in (True, False)]


def _methods_are_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(argument_flow, "functions_in_class", lambda kind: [])


def _modules_read_what_they_receive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chosen_numbers, "may_pick_arguments", lambda pick, code, modules: False)


ABLATIONS = [
    Ablation(
        "methods of plain objects see what these keep",
        _methods_are_not_read,
        "a level that a property computes, in place",
    ),
    Ablation(
        "a module may pick what no op of it reads",
        _modules_read_what_they_receive,
        "a level that an object keeps, in a module without ops",
    ),
]
