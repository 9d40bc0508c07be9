"""Traps: functions and modules that a text of the caller's, or the caller itself, chooses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import arguments
from engine.flow.argument_flow import PassedArguments
from engine.unrecorded import unreached
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class Acts:
    """Functions by name."""

    rectified = staticmethod(F.relu)
    squashed = staticmethod(torch.sigmoid)


RELU = functools.partial(F.relu, inplace=False)
SPACE = SimpleNamespace(first=torch.tanh, second=torch.cos)


def by_table(h: Tensor, kind: str) -> Tensor:
    """Return features after a function of a table."""
    return {"gated": torch.sigmoid, "plain": F.relu}[kind](h)


def by_name(h: Tensor, kind: str) -> Tensor:
    """Return features after a function of torch's."""
    return getattr(torch, kind)(h)  # type: ignore[no-any-return]


def called(h: Tensor, function: Any) -> Any:
    """Return what a function makes of features."""
    return function(h)


class Part(nn.Module):
    """A layer, and a function that its caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, h: Tensor, kind: str = "plain") -> Tensor:
        """Return features."""
        h = self.body(h)
        match kind:
            case "plain":
                return h.relu()
            case "cosine":
                return h.cos()
            case _:
                raise ValueError(kind)


class Net(nn.Module):
    """A stem, a body, a part and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.part, self.head = nn.Linear(6, 8), nn.Linear(8, 8), Part(), nn.Linear(8, 3)
        self.heads = nn.Module()
        self.heads.cars, self.heads.cats = nn.Linear(8, 3), nn.Linear(8, 2)
        self.act = "relu"

    def use(self, act: str) -> None:
        """Choose another function."""
        self.act = act

    def rest(self, h: Tensor) -> Tensor:
        """Return logits of features."""
        return self.head(self.body(h).tanh())  # type: ignore[no-any-return]


def _functional(self: Any, x: Tensor, act: str = "relu") -> Any:
    return self.rest(getattr(F, act)(self.stem(x)))


def _with_dimension(self: Any, x: Tensor, how: str = "sqrt") -> Any:
    h = self.stem(x).relu()
    return self.rest(getattr(torch, how)(h))


def _method(self: Any, x: Tensor, act: str = "relu") -> Any:
    return self.rest(getattr(self.stem(x), act)())


def _variable(self: Any, x: Tensor, act: str = "relu") -> Any:
    function = getattr(F, act) if act else torch.tanh
    h = self.stem(x)
    h = function(h)
    return self.rest(h)


def _class(self: Any, x: Tensor, act: str = "ReLU") -> Any:
    return self.rest(getattr(nn, act)()(self.stem(x)))


def _identity(self: Any, x: Tensor, act: str = "Identity") -> Any:
    return self.rest(getattr(nn, act)()(self.stem(x)))


def _attrgetter(self: Any, x: Tensor, act: str = "relu") -> Any:
    return self.rest(operator.attrgetter(act)(F)(self.stem(x)))


def _dictionary(self: Any, x: Tensor, act: str = "relu") -> Any:
    return self.rest(F.__dict__[act](self.stem(x)))


def _helper(self: Any, x: Tensor, act: str = "relu") -> Any:
    return self.rest(by_name(self.stem(x), act))


def _helper_table(self: Any, x: Tensor, act: str = "plain") -> Any:
    return self.rest(by_table(self.stem(x), act))


def _namespace(self: Any, x: Tensor, act: str = "rectified") -> Any:
    return self.rest(getattr(Acts, act)(self.stem(x)))


def _object(self: Any, x: Tensor, act: str = "first") -> Any:
    return self.rest(getattr(SPACE, act)(self.stem(x)))


def _matched(self: Any, x: Tensor, kind: str = "plain") -> Any:
    return self.rest(self.part(self.stem(x), kind))


def _part_of_a_part(self: Any, x: Tensor, task: str = "cars") -> Any:
    return getattr(self.heads, task)(self.body(self.stem(x).relu()).tanh())


def _attribute(self: Any, x: Tensor) -> Any:
    return self.rest(getattr(F, self.act)(self.stem(x)))


def _attribute_to_a_function(self: Any, x: Tensor) -> Any:
    return self.rest(by_name(self.stem(x), self.act))


def _function(self: Any, x: Tensor, act: Any = F.relu) -> Any:
    return self.rest(act(self.stem(x)))


def _partial(self: Any, x: Tensor, act: Any = RELU) -> Any:
    return self.rest(called(self.stem(x), act))


def _x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _call(**kwargs: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(_x(), **kwargs)

    return use


def _after(act: str) -> Use:
    def use(model: Any) -> Any:
        model.use(act)
        with torch.no_grad():
            return model.eval()(_x())

    return use


class ScaledNorm(nn.LayerNorm):
    """A norm with attributes and methods of its own."""

    _size, _spans, _pinned = 0.5, 0.25, 2.0

    def _plain(self, h: Tensor) -> Tensor:
        return h * self._size + self._spans * self._pinned

    def forward(self, h: Tensor) -> Tensor:
        """Return features."""
        return super().forward(self._plain(h))


class MeanSquare(nn.Module):
    """A norm written out, with attributes of its own."""

    _size, _spans, _pinned, _spreads = 0.5, 0.25, 2.0, True

    def __init__(self, size: int) -> None:
        super().__init__()
        self._spread_dim, self.weight = 0.75, nn.Parameter(torch.ones(size))

    def forward(self, h: Tensor) -> Tensor:
        """Return features."""
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self._spans) * self._size
        return self.weight * h * self._pinned * self._spread_dim


def _own_names(name: str, norm: type[nn.Module]) -> Trap:
    return Trap(
        name,
        "underscored members, such as def _plain(self, x), of subclasses of norms",
        lambda: nn.Sequential(nn.Linear(5, 8), norm(8), nn.Linear(8, 3)),
        lambda _: torch.ones(2, 5, dtype=torch.float64),
        [once(3, 5)],
        shrinks="repaired",
    )


def _trap(name: str, source: str, forward: Callable[..., Any], *uses: Use, shrinks: bool = True) -> Trap:
    example = torch.zeros(2, 6, dtype=torch.float64)
    make = lambda: type("Net", (Net,), {"forward": forward, "__module__": __name__})()  # noqa: E731
    return Trap(
        name=name, source=source, make=make, example=lambda _: example, uses=[_call(), *uses], shrinks=shrinks,
    )  # fmt: skip


TRAPS = [
    _trap("a function of torch by name", "getattr(F, activation)(x)", _functional, _call(act="softplus")),
    _trap("a function that mixes channels by name", "getattr(F, norm)(x)", _functional, _call(act="normalize")),
    _trap("a function of numbers by name", "getattr(torch, how)(x)", _with_dimension, _call(how="cos")),
    _trap("a method by name", "getattr(x, act)()", _method, _call(act="sigmoid")),
    _trap("a function by name in a variable", "fn = getattr(F, act)", _variable, _call(act="sigmoid")),
    _trap("a class of torch by name", "getattr(nn, act)()(x)", _class, _call(act="Softplus")),
    _trap("a class that does nothing by name", "getattr(nn, act)()(x)", _identity, _call(act="Softplus")),
    _trap("a function by attrgetter", "operator.attrgetter(act)(F)", _attrgetter, _call(act="sigmoid")),
    _trap("a function in a module's dictionary", "F.__dict__[act]", _dictionary, _call(act="sigmoid")),
    _trap("a function by name in a helper", "def act(x, kind): getattr(torch, kind)(x)", _helper, _call(act="cos")),
    _trap("a table in a helper", "def act(x, kind): {...}[kind](x)", _helper_table, _call(act="gated")),
    _trap("a class of functions by name", "getattr(Acts, act)(x)", _namespace, _call(act="squashed")),
    _trap("an object of functions by name", "getattr(SPACE, act)(x)", _object, _call(act="second")),
    _trap("a text that a part matches", "match kind: case 'cosine'", _matched, _call(kind="cosine")),
    _trap("a part of a part by name", "getattr(self.heads, task)(x)", _part_of_a_part, _call(task="cats")),
    _trap("a function by the text in an attribute", "set_activation(name)", _attribute, _after("sigmoid")),
    _trap("a helper by the text in an attribute", "act(x, self.act)", _attribute_to_a_function, _after("cos")),
    _trap("a function of the caller's", "forward(x, act=F.relu)", _function, _call(act=torch.sigmoid)),
    _trap("a function of the caller's, passed on", "run(x, act)", _partial, _call(act=torch.sigmoid)),
    _own_names("a norm with members under names of the engine's", ScaledNorm),
    _own_names("a mean with members under names of the engine's", MeanSquare),
]


def _no_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached, "assume_nothing_of_dynamic_calls", lambda *arguments: None)


def _only_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "passed_arguments", lambda model, names: PassedArguments())


def _no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "choices", lambda value, module, *spaces: iter(()))


ABLATIONS = [
    Ablation("functions that the caller chooses may do anything", _no_picks, "a function of torch by name"),
    Ablation("texts of code that arguments are passed to", _only_forward, "a table in a helper"),
    Ablation("names of parts of parts are tried", _no_parts, "a part of a part by name"),
]
