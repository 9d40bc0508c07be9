"""Functions that a call may run."""

from __future__ import annotations

import ast

import torch
from torch import Tensor, nn

from engine.source.callees import attribute_of, functions_run_by, inherited, items, own_calls, parts


class Base(nn.Module):
    """Has a forward, and a property that fails."""

    @property
    def broken(self) -> int:
        """Fail."""
        raise AssertionError

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class Derived(Base):
    """Calls the forward of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return super().forward(x)


def test_attributes_are_looked_up_without_running_code() -> None:
    """A property is no function that a call runs."""
    module = Derived()
    assert attribute_of(module, "broken") is None
    assert attribute_of(module, "forward").__func__ is Derived.forward
    assert attribute_of(torch, "relu") is torch.relu and attribute_of(3, "real") is None


def test_the_function_of_a_base_class() -> None:
    """It is the next one in the order of classes."""
    [method] = inherited(Derived(), Derived.forward.__code__, "forward")
    assert method.__func__ is Base.forward


def test_modules_in_containers() -> None:
    """Numbers in them run nothing."""
    layer = nn.ReLU()
    assert list(items({"a": layer, "b": 3})) == [layer] and list(items(nn.Sequential(layer))) == [layer]
    assert list(functions_run_by(layer)) == []  # of torch
    assert [function.__func__ for function in functions_run_by(Derived())] == [Derived.forward]  # type: ignore[union-attr]


def test_parts_of_a_call() -> None:
    """What is iterated over may be any of its arguments."""
    call = ast.parse("zip(a, enumerate(b))", mode="eval").body
    assert [n.id for n in parts(call) if isinstance(n, ast.Name)] == ["a", "b"]


class Called(Base):
    """Has a call of its own."""

    def __call__(self, x: Tensor, flip: bool = False) -> Tensor:
        """Return the input."""
        return super().__call__(x.flip(0) if flip else x)  # type: ignore[no-any-return]


def test_a_call_of_the_modules_own() -> None:
    """It runs before forward; that of torch does not count."""
    assert [function.__name__ for function in functions_run_by(Called())] == ["__call__", "forward"]
    assert [call.__func__ for call in own_calls(Called())] == [Called.__call__]  # type: ignore[union-attr]
    assert not own_calls(Base())
