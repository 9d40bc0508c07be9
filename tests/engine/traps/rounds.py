"""Traps: loops that run more often, or less, than with the example: what they carry is another number then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives.other_sizes import OtherSizes
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.table = nn.Embedding(8, 8)


class _Items(_Net):
    def forward(self, items: Sequence[Tensor]) -> Tensor:
        return self.leave(sum(torch.relu(self.enter(item)) for item in items))  # type: ignore[no-any-return]


class _Steps(_Net):
    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        h = torch.zeros(())
        for _ in range(steps):
            h = h + torch.relu(self.enter(x))
        return self.leave(h)  # type: ignore[no-any-return]


class _Time(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(())
        for frame in (x[:, t] for t in range(x.shape[1])):
            h = h + torch.relu(self.enter(frame))
        return self.leave(h)  # type: ignore[no-any-return]


class _Decay(_Net):
    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        h = torch.relu(self.enter(x))
        while steps:
            h, steps = h * 0.5, steps - 1
        return self.leave(h)  # type: ignore[no-any-return]


class _Table(_Net):
    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        h = torch.zeros(())
        for step in range(steps):
            h = h + torch.relu(self.enter(x) + self.table.weight[step])
        return self.leave(h)  # type: ignore[no-any-return]


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _called(*args: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(*args)

    return use


def _steps(*numbers: int) -> list[Use]:
    return [_called(_noise(3, 4), number) for number in numbers]


def _trap(name: str, source: str, make: Callable[[], nn.Module], example: Any, uses: Sequence[Use]) -> Trap:
    return Trap(name, source, make, lambda model: example, uses, seeds=(0, 1, 2))


REFINE = "RAFT, diffusion samplers: for _ in range(iterations)"

TRAPS = [
    _trap("a sum over more items", "deep sets", _Items, ([_noise(2, 4)] * 2,), [_called([_noise(3, 4)] * 3)]),
    _trap("a sum over more steps", REFINE, _Steps, _noise(2, 4), _steps(3, 5)),
    _trap("a sum over more frames", "unrolled recurrence", _Time, _noise(2, 5, 4), [_called(_noise(3, 7, 4))]),
    _trap("a decay over more steps", REFINE, _Decay, _noise(2, 4), _steps(0, 3, 5)),
    _trap("a table by the number of the step", "step embeddings of samplers", _Table, _noise(2, 4), _steps(3, 5, 8)),
]


def _carries_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OtherSizes, "carried", lambda self, nodes: set())


ABLATIONS = [
    Ablation("what a loop carries varies if it runs more often", _carries_nothing, "a sum over more steps"),
]
