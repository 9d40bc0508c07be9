"""Traps: conditions on what a variable holds, whose other outcome no example shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.flow import mutability
from engine.unrecorded import unreached
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Return noise that no certificate has seen."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def rest(self, x: Tensor) -> Any:
        """Return scores."""
        return self.leave(torch.relu(self.inner(x)))


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            x = x[0].flip(1) + x[1]
        return torch.relu(self.inner(x))


class OfPictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.stage, self.leave = nn.Linear(6, 8), Joins(), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            h: Any = [torch.relu(self.enter(item)) for item in x]
        else:
            h = torch.relu(self.enter(x))
        return self.leave(self.stage(h))


class SkipsForPictures(OfPictures):
    def forward(self, x: Any) -> Any:
        if not isinstance(x, list):
            x = torch.relu(self.enter(x))
        return self.leave(self.stage(x))


class PassesForPictures(OfPictures):
    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            pass
        else:
            x = torch.relu(self.enter(x))
        return self.leave(self.stage(x))


class TriesForPictures(OfPictures):
    def forward(self, x: Any) -> Any:
        try:
            x = torch.relu(self.enter(x))
        except TypeError:
            pass
        return self.leave(self.stage(x))


class AsksBefore(Net):
    def forward(self, x: Any) -> Any:
        several = isinstance(x, list)
        x = torch.relu(self.enter(x[0] if several else x))
        if several:
            x = x.flip(1)
        return self.rest(x)


class LeavesOut(Net):
    def forward(self, x: Tensor, table: Any = None) -> Any:
        h = torch.relu(self.enter(x))
        if table is None:
            v: Tensor | None = h * 2.0
        else:
            v = None
        y = v if v is not None else h.flip(1)
        return self.rest(y)


class ReturnsNothing(Net):
    def twice(self, h: Tensor, table: Any) -> Tensor | None:
        """Return what is read in the place of the features, or nothing."""
        if table is not None:
            return None
        return h * 2.0

    def forward(self, x: Tensor, table: Any = None) -> Any:
        h = torch.relu(self.enter(x))
        v = self.twice(h, table)
        y = v if v is not None else h.flip(1)
        return self.rest(y)


class Turns:
    def __call__(self, x: Tensor) -> Tensor:
        return x.flip(1)


class AddsFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.post: Any = None

    def start(self) -> None:
        """Set what comes behind the features."""
        self.post = Turns()

    def stop(self) -> None:
        """Remove it."""
        self.post = None

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.enter(x))
        if self.post is not None:
            h = h.flip(1)
        return self.rest(h)


class AddsByName(AddsFunction):
    def start(self) -> None:
        """Set what comes behind the features, by its name."""
        self.post = None
        setattr(self, "post", Turns())  # noqa: B010


class BehindLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.way = "first"

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.enter(x))
        h = self.inner(h) if self.way == "first" else self.inner(h).view(-1, 2, 4).flip(1).flatten(1)
        return self.leave(h)


def _pair(model: nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()([noise(5, 6), noise(5, 6, seed=8)])


def _features(model: nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()([noise(5, 8), noise(5, 8, seed=8)])


def _with_table(model: nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()(noise(5, 6), table={"a": 1})


def _started(model: Any) -> Any:
    model.start()
    return once(5, 6)(model)


def _other_way(model: Any) -> Any:
    model.way = "second"
    return once(5, 6)(model)


def _trap(name: str, source: str, make: Callable[[], nn.Module], use: Use) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 6, dtype=torch.float64),
        uses=[once(4, 6), use],
        shrinks=True,
    )


TRAPS = [
    _trap("a list of pictures", "multi-crop wrappers: isinstance(x, list)", OfPictures, _pair),
    _trap("features in a list, skipped", "if isinstance(x, Tensor), and nothing else", SkipsForPictures, _features),
    _trap("features in a list, passed", "if isinstance(x, list): pass", PassesForPictures, _features),
    _trap("features in a list, caught", "except TypeError: pass", TriesForPictures, _features),
    _trap("a type that is asked for before", "several = isinstance(x, list)", AsksBefore, _pair),
    _trap("nothing, in the other branch", "timm Sequencer2d: v = None", LeavesOut, _with_table),
    _trap("nothing, from a method", "an optional branch of a block", ReturnsNothing, _with_table),
    _trap("a function in the place of nothing", "self.act = None, set later", AddsFunction, _started),
    _trap("a function by name, in the place of nothing", "setattr(self, name, function)", AddsByName, _started),
    _trap(
        "a width behind a layer in the other branch", "self.qkv(x).view(b, 3, 4) under a text", BehindLayer, _other_way
    ),
]


def _types_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached._UntakenBranches, "_other_types_lead_elsewhere", lambda self: False)


def _stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutability, "assigned_where_none_by_class", lambda model: {})


ABLATIONS = [
    Ablation("a type is settled only if no other type leads elsewhere", _types_agree, "features in a list, passed"),
    Ablation(
        "what is None stays so only if no code assigns to it then", _stays_none, "a function in the place of nothing"
    ),
]
