"""Modules that import something when an attribute is asked for, and classes that stand for one that is missing."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.flow.argument_flow import passed_arguments
from engine.flow.dynamic_calls import module_globals
from engine.source.static_attributes import attribute_of_a_part, static_attribute, table_of


class Lazy(types.ModuleType):
    """A module that is imported when an attribute is asked for, and cannot be."""

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # the search for doctests asks for it
            raise AttributeError(name)
        raise ImportError(f"{name} of {self.__class__.__name__} asks for a package that is not installed")


class Missing(type):
    """The class of a class that stands for one of a package that is not installed."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ImportError(f"{name} asks for a package that is not installed")


class Unavailable(metaclass=Missing):
    """Stands for such a class."""


LAZY = Lazy("lazy")


class Net(nn.Module):
    """Chooses its activation by a name, and has code that asks a lazy module when it did not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, act: str = "relu") -> Tensor:
        """Apply the layers."""
        h = getattr(torch, act)(self.first(x))
        if act == "none" and LAZY.switch and Unavailable.ready:
            h = h + LAZY.shift(act) + Unavailable.shift(act)
        return self.last(h)


@pytest.fixture(autouse=True)
def _loaded() -> Iterator[None]:
    engine.trace(nn.Linear(1, 1), torch.zeros(1, 1))  # torch imports parts of itself then, and asks all modules
    # in front of all others, so that whoever looks for a module comes across it
    everything = dict(sys.modules)
    sys.modules.clear()
    sys.modules.update({"lazy": LAZY, "unimported": None} | everything)  # type: ignore[dict-item]
    yield
    for name in ("lazy", "unimported"):
        sys.modules.pop(name, None)


def test_no_attribute_is_imported() -> None:
    """What a module or class would only import is not there."""
    assert static_attribute(LAZY, "switch", 3) == 3
    assert static_attribute(Unavailable, "ready", 3) == 3
    assert module_globals(__file__)["LAZY"] is LAZY
    assert table_of(LAZY)["__name__"] == "lazy"


def test_methods_are_functions() -> None:
    """Static and class methods are found as functions."""

    class Both:
        @staticmethod
        def one() -> None:
            """Do nothing."""

        @classmethod
        def other(cls) -> None:
            """Do nothing."""

    assert isinstance(static_attribute(Both, "one"), types.FunctionType)
    assert isinstance(static_attribute(Both, "other"), types.FunctionType)


def test_a_model_beside_a_lazy_module_is_traced() -> None:
    """Neither the search for the functions of a file nor that for callees asks a lazy module."""
    groups = engine.dependency_groups(Net(), torch.zeros(2, 4))
    assert groups


def test_what_a_part_of_a_package_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument is followed into a function that a package shows without holding it."""

    class Package(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(sys.modules["package.part"], name)

    def shifted(x: Tensor, flag: bool) -> Tensor:
        return x + 1 if flag else x

    package, part = Package("package"), types.ModuleType("package.part")
    part.shifted = shifted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "package", package)
    monkeypatch.setitem(sys.modules, "package.part", part)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert attribute_of_a_part(package, "shifted") is shifted
    assert attribute_of_a_part(package, "part") is part
    assert passed_arguments(Calls(), {"flag"}).by_code[shifted.__code__] == {"flag"}


class Calls(nn.Module):
    """Passes its argument on to a function of a package."""

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        """Call the function."""
        return PACKAGE.shifted(x, flag)  # type: ignore[name-defined,no-any-return]  # noqa: F821
