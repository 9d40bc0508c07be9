"""Traps: lists, tuples and dictionaries of other lengths than the example's."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.arguments import Arguments
from tests.engine.traps.trap import Ablation, Trap, Use

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
]  # fmt: skip


def _one_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arguments, "lengths", lambda self: iter(()))


ABLATIONS = [Ablation("containers of other lengths are recorded", _one_length, "features added over a list")]
