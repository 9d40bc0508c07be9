"""Traps: lists, tuples and dictionaries of other lengths than the example's."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.alternatives.arguments import Arguments
from engine.unrecorded import picked_items
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.enter, self.again, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class _State(_Net):
    def forward(self, frames: Sequence[Tensor]) -> Tensor:
        h = frames[0].new_zeros(len(frames[0]), self.width)
        for frame in frames:
            h = torch.relu(self.enter(frame) + self.again(h))
        return self.leave(h)  # type: ignore[no-any-return]


class _Sum(_Net):
    def forward(self, frames: Sequence[Tensor]) -> Tensor:
        return self.leave(sum(torch.relu(self.enter(frame)) for frame in frames))  # type: ignore[no-any-return]


class _Table(_Net):
    def forward(self, views: Mapping[str, Tensor]) -> Tensor:
        features = functools.reduce(lambda h, view: torch.relu(self.enter(view) + h), views.values(), 0)
        return self.leave(features)  # type: ignore[no-any-return]


class _Rest(_Net):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        for other in more:
            h = torch.relu(self.again(h) + self.enter(other))
        return self.leave(h)  # type: ignore[no-any-return]


class _TwoLists(_Net):
    def forward(self, frames: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
        h = self.enter(frames[0]) * 0
        for frame, scale in zip(frames, scales, strict=True):
            h = torch.relu(self.enter(frame) * scale + self.again(h))
        return self.leave(h)  # type: ignore[no-any-return]


class _Nothing(_Net):
    def forward(self, frames: Sequence[Tensor], start: Tensor) -> Tensor:
        h = torch.relu(self.enter(start))
        for frame in frames:
            h = torch.relu(self.again(self.enter(frame)))
        return self.leave(h)  # type: ignore[no-any-return]


class _Pyramid(nn.Module):
    """Laterals of a list of layers, each of which gets what is above it."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv1d(n, m, 3, 2, 1) for n, m in ((3, 4), (4, 6), (6, 8)))
        self.laterals = nn.ModuleList(nn.Conv1d(n, 6, 1) for n in (4, 6, 8))
        self.head = nn.Conv1d(6, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for stage in self.stages:
            x = torch.relu(stage(x))
            features.append(x)
        levels = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        used = len(levels)
        for i in range(used - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=levels[i - 1].shape[2:])
        return [self.head(levels[i]) for i in range(used)]


class _Middle(_Net):
    """The item in the middle of a list that has one item for each 40 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        levels = [self.again(h).roll(i, -1) for i in range(1 + x.shape[1] // 40)]
        return self.leave(levels[len(levels) // 2])  # type: ignore[no-any-return]


class _Unpacked(_Net):
    """The same, with the items in a display."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(torch.relu(self.enter(x)))
        levels = [h, *(h.roll(1 + i, -1) for i in range(x.shape[1] // 40))]
        levels[0] = levels[0] * 2
        return self.leave(levels[len(levels) // 2])  # type: ignore[no-any-return]


class _Step(_Sum):
    def loss(self, frames: Sequence[Tensor]) -> Tensor:
        return super().forward(frames).square().mean()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.leave(torch.relu(self.again(torch.relu(self.enter(x)))))  # type: ignore[no-any-return]


def _noise(count: int, rows: int = 3) -> list[Tensor]:
    return [torch.randn(rows, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(count)]


def _called(*args: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(*args)

    return use


def _trap(name: str, source: str, make: Callable[[], nn.Module], example: Any, *uses: Use, **options: Any) -> Trap:
    return Trap(name, source, make, lambda model: example(), uses=uses, **{"shrinks": "repaired", **options})


VIDEO = "recurrent video models: for frame in frames: state = cell(frame, state)"

TRAPS = [
    _trap("a state over a list of frames", VIDEO, _State, lambda: (_noise(1),), _called(_noise(3)), _called(_noise(2))),
    _trap("features added over a list", "deep sets: sum(net(x) for x in items)", _Sum, lambda: (_noise(1),),
          _called(_noise(2)), _called(_noise(4))),
    _trap("features added over a table", "multi-modal fusion over a dictionary of views", _Table,
          lambda: (OrderedDict(a=_noise(1)[0]),), _called(OrderedDict(zip("abc", _noise(3), strict=True))),
          shrinks=False),
    _trap("as many arguments as there are", "forward(self, x, *skips)", _Rest, lambda: (_noise(1)[0],),
          _called(*_noise(2)), _called(*_noise(3))),
    _trap("two lists of one length", VIDEO, _TwoLists, lambda:
          (_noise(1), [torch.ones(3, 1, dtype=torch.float64)]),
          _called(_noise(3), [torch.full((3, 1), 0.5 * n, dtype=torch.float64) for n in range(3)])),
    _trap("a list that may be empty", VIDEO, _Nothing, lambda: (_noise(1), _noise(1)[0]), _called([], _noise(2)[1]),
          _called(_noise(2), _noise(1)[0])),
    _trap("a step over a list", "multi-crop losses: sum over the views of a batch", _Step, lambda: (_noise(1)[0],),
          lambda model: model.loss(_noise(3)), _called(_noise(2)[1]),
          trace=lambda model: {"entries": [engine.Entry(model.loss, (_noise(1),))]}),
    _trap("levels from the last one on", "mmdetection necks/fpn.py FPN.forward", _Pyramid,
          lambda: torch.zeros(2, 3, 16, dtype=torch.float64), once(1, 3, 24), once(3, 3, 17), shrinks=True),
    *(_trap(name, "anchors in the middle of a list", make, lambda: torch.zeros(2, 5, 4, dtype=torch.float64),
            once(2, 300, 4), once(1, 90, 4), once(1, 7, 4), shrinks=False)
      for name, make in (("the middle one of some items, by a size", _Middle),
                         ("the middle one of some items, in a display", _Unpacked))),
]  # fmt: skip


def _one_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arguments, "lengths", lambda self: iter(()))


def _no_lengths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(picked_items, "lengthening_values", lambda name, tree: iter(()))


ABLATIONS = [
    Ablation("containers of other lengths are recorded", _one_length, "features added over a list"),
    Ablation("lengths of lists follow what they unpack", _no_lengths, "the middle one of some items, in a display"),
]
