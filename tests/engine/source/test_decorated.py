"""Functions behind decorators, properties and objects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from engine.source.decorated import functions_behind, is_of_torch


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function without saying so."""
    return lambda *args: function(*args)


class ByObject:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Items:
    """One of each."""

    @property
    def looked_up(self) -> None:
        """A property with a setter."""

    @looked_up.setter
    def looked_up(self, value: int) -> None:
        self.value = value

    @staticmethod
    def static() -> None:
        """A static method."""

    @classmethod
    def of_class(cls) -> None:
        """A class method."""

    @functools.cached_property
    def cached(self) -> int:
        """A cached property."""
        return 1

    @functools.lru_cache  # noqa: B019 -- never called
    def remembered(self) -> None:
        """A cached method."""

    @torch.no_grad()
    @plain
    def twice(self) -> None:
        """Two decorators, one of which says what it wraps."""

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context."""
        yield

    @ByObject
    def by_object(self) -> None:
        """A method behind an object."""

    partial = functools.partial(static, 1)
    number = 3


@pytest.mark.parametrize(
    "name", ["static", "of_class", "cached", "remembered", "twice", "context", "by_object", "looked_up"]
)
def test_functions_behind_an_item(name: str) -> None:
    """Whatever stands around them."""
    assert name in {function.__name__ for function in functions_behind(vars(Items)[name], __name__)}


def test_both_functions_of_a_property_and_none_of_a_number() -> None:
    """A getter and a setter; what is no function has none."""
    assert len(list(functions_behind(vars(Items)["looked_up"], __name__))) == 2
    assert [f.__name__ for f in functions_behind(Items.partial, __name__)] == ["static"]
    assert not list(functions_behind(Items.number, __name__))


def test_functions_of_other_python_modules_are_not_followed() -> None:
    """A closure holds much that does not run."""
    assert "twice" not in {function.__name__ for function in functions_behind(vars(Items)["twice"], "elsewhere")}


def test_a_closure_that_is_not_filled_yet() -> None:
    """A function may refer to one that is defined later."""

    def outer() -> Callable[[], Any]:
        def inner() -> Any:
            return later()

        found = list(functions_behind(inner, __name__))
        assert found == [inner]

        def later() -> None:
            """Stand for what is defined later."""

        return inner

    outer()


def test_classes_of_torch() -> None:
    """Layers, and the base of all classes."""
    assert is_of_torch(nn.Conv2d) and is_of_torch(object) and not is_of_torch(Items)
