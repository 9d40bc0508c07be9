"""Traps: flags that functions set which are no methods of the module, or that decorators hide."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.source import attribute_writes, decorated
from tests.engine.traps.entering import called, noise
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Two layers, with features between them that a flag turns around."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.by_function = self.by_inner = self.by_static = self.by_wrapped = self.by_context = False
        self.by_two = self.by_plain = self.by_object = self.by_property = self.by_cached = self.by_table = False

    def features(self, x: Tensor) -> Tensor:
        """Return what stands between the layers."""
        return torch.relu(self.enter(x)) + 0.5


class _Function(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_function else h)


def _turn(model: Any) -> None:
    model.by_function = True


class _Inner(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_inner else h)

    def turn(self) -> None:
        """Set the flag of all parts that have one."""

        def set_flag(part: Any) -> None:
            if hasattr(part, "by_inner"):
                part.by_inner = True

        self.apply(set_flag)


class _Static(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_static else h)


class _Helper:
    @staticmethod
    def turn(model: Any) -> None:
        model.by_static = True


class _Wrapped(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_wrapped else h)


@torch.no_grad()
def _turn_without_gradients(on: bool, model: Any) -> None:
    model.by_wrapped = on


class _Context(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_context else h)


@contextlib.contextmanager
def _turned(model: Any) -> Iterator[None]:
    model.by_context = True
    yield
    model.by_context = False


def _within(model: Any) -> Any:
    with _turned(model), torch.no_grad():
        return model.eval()(noise(5))


class _Two(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_two else h)

    @torch.no_grad()
    @torch.inference_mode(False)
    def turn(self) -> None:
        """Set the flag, behind two decorators."""
        self.by_two = True


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return call


class _Plain(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_plain else h)

    @_logged
    def turn(self) -> None:
        """Set the flag, behind a decorator that does not say what it wraps."""
        self.by_plain = True


class _Logged:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Object(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_object else h)


@_Logged
def _turn_by_object(model: Any) -> None:
    model.by_object = True


class _Property(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_property else h)

    @property
    def turned(self) -> bool:
        """Whether features are turned around."""
        return self.by_property

    @turned.setter
    def turned(self, on: bool) -> None:
        self.by_property = on


def _assigned(model: Any) -> None:
    model.turned = True


class _Cached(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_cached else h)


@functools.lru_cache
def _turn_once(model: Any) -> None:
    model.by_cached = True


class _Table(_Net):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.leave(h.flip(1) if self.by_table else h)


def _turner() -> Callable[[Any], None]:
    def turn(model: Any) -> None:
        model.by_table = True

    return turn


_ACTIONS = {"turn": lambda model: setattr(model, "by_table", True), "again": _turner()}


class _Decorated(_Net):
    @_logged
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        """Features, and what the caller adds to all of them."""
        h = self.features(x)
        if shift is not None:
            h = h + shift
        return self.leave(h)


def _after(turn: Callable[[Any], None]) -> Use:
    def use(model: nn.Module) -> Any:
        turn(model)
        with torch.no_grad():
            return model.eval()(noise(5))

    return use


_WAYS: list[tuple[str, str, type[nn.Module], Use]] = [
    ("a flag that a function sets", "set_grad_checkpointing(model), as feature extractors", _Function, _after(_turn)),
    ("a flag that an inner function sets", "self.apply(set_flag), fairseq", _Inner, _after(lambda m: m.turn())),
    ("a flag that a static method sets", "static methods of a helper", _Static, _after(_Helper.turn)),
    ("a flag set without gradients", "@torch.no_grad() on a function that switches a model", _Wrapped,
     _after(lambda m: _turn_without_gradients(True, m))),
    ("a flag within a context", "@contextlib.contextmanager around a switch: disable_adapter", _Context, _within),
    ("a flag behind two decorators", "@torch.no_grad() over a further one", _Two, _after(lambda m: m.turn())),
    ("a flag behind a plain decorator", "a decorator without functools.wraps", _Plain, _after(lambda m: m.turn())),
    ("a flag behind an object", "a class as a decorator", _Object, _after(_turn_by_object)),
    ("a flag behind a property", "a setter of a property", _Property, _after(_assigned)),
    ("a flag that a cached function sets", "functools.lru_cache on a function", _Cached, _after(_turn_once)),
    ("a flag that a function in a table sets", "ACTIONS = {name: function}", _Table, _after(_ACTIONS["turn"])),
]  # fmt: skip


TRAPS = [
    Trap(
        name=name, source=source, make=make, example=lambda model: noise(3), uses=[called(noise(4)), use], shrinks=True
    )
    for name, source, make, use in _WAYS
] + [
    Trap("an argument of a forward behind a plain decorator", "a decorator without functools.wraps", _Decorated,
         lambda model: noise(3), [called(noise(4)), called(noise(4), shift=torch.ones(4, 1, dtype=torch.float64))]),
]  # fmt: skip


def _as_methods(patch: pytest.MonkeyPatch) -> None:
    names = attribute_writes._names
    patch.setattr(
        attribute_writes, "_names", lambda code, self_name: names(code, attribute_writes._first_argument(code))
    )
    attribute_writes._names_in_python_module.cache_clear()


def _of_wrappers_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decorated, "_PARTS", ())
    patch.setattr(decorated, "_closure", lambda function: iter(()))
    attribute_writes._names_in_python_module.cache_clear()
    attribute_writes._names_in_class.cache_clear()


ABLATIONS = [
    Ablation("the first argument of a function is no self", _as_methods, "a flag that a function sets"),
    Ablation("decorators are followed", _of_wrappers_alone, "a flag behind a plain decorator"),
]
