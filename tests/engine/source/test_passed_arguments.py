"""What a running function was passed, as its caller's source says."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.source.passed_arguments import passed_argument


def passed(name: str = "shape") -> str | None:
    """Return what the calling function was passed, as text; "default" where it was not."""
    argument = passed_argument(name, sys._getframe(1))
    if argument is None:
        return None
    return "default" if argument.expression is None else ast.unparse(argument.expression)


def plain(x: Any, shape: Any = None) -> str | None:
    """Return what was passed as the shape."""
    return passed()


class Backend:
    """Has methods of each kind."""

    def own(self, x: Any, shape: Any) -> str | None:
        """Return what was passed as the shape."""
        return passed()

    @staticmethod
    def static(x: Any, shape: Any) -> str | None:
        """Return what was passed as the shape."""
        return passed()

    @classmethod
    def of_class(cls, x: Any, shape: Any) -> str | None:
        """Return what was passed as the shape."""
        return passed()


def test_calls_that_name_the_function() -> None:
    """By position and by keyword, of a function, of methods, in a comprehension; a default is none of these."""
    backend, rows = Backend(), 3
    assert plain(1, (rows, -1)) == plain(1, shape=(rows, -1)) == "(rows, -1)"
    assert [backend.own(1, (k, -1)) for k in range(1)] == ["(k, -1)"]
    assert backend.static(1, (rows, -1)) == Backend.of_class(1, (rows, -1)) == backend.of_class(1, (rows, -1))
    assert plain(1) == "default"


def test_calls_that_pass_something_else() -> None:
    """Wrappers, unpacked arguments, and functions that another one calls."""
    sequence, options = (1, 2), {"shape": 3}
    wrapped = functools.partial(plain, 5)
    assert wrapped((1, 2)) is None and plain(*sequence) is None and plain(1, **options) is None
    assert list(map(plain, (1, 2), (3, 4))) == [None, None]
    change: Callable[..., Any] = lambda x, shape: plain(x, shape)  # noqa: E731
    assert change(1, 2) == "shape"  # what the lambda passes, which is called by another name


class Layer(nn.Module):
    """Takes a size beside its tensor."""

    def forward(self, x: Tensor, height: int) -> Any:
        """Return what was passed as the height."""
        return passed("height")


def test_a_module() -> None:
    """Torch's own frames lie between; a hook may pass another number, unless it belongs to a recording."""
    layer, side = Layer(), 4
    assert layer(torch.zeros(1), side) == layer(torch.zeros(1), height=side) == "side"
    assert nn.Sequential(layer)[0](torch.zeros(1), side) is None  # found by an item, which is not looked up
    layer.register_forward_pre_hook(lambda module, args: (args[0], 7))
    assert layer(torch.zeros(1), side) is None
