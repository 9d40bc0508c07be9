"""Traps: dimensions that go where they have a single entry, as a dimension of channels may after a compaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import squeezing
from tests.engine.exactness import Masks, layers
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Pooled(nn.Module):
    def __init__(self, squeeze: Callable[[Tensor], Tensor] = Tensor.squeeze) -> None:
        super().__init__()
        self.squeeze = squeeze
        self.stem, self.head, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.stem(x).relu(), 1)
        return self.last(self.head(self.squeeze(pooled)).relu())  # type: ignore[no-any-return]


class _LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.rnn(x)
        return self.last(self.head(h.squeeze()).relu().squeeze())  # type: ignore[no-any-return]


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 1), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.stem(x).relu().permute(0, 2, 3, 1), self.head.weight.squeeze(), self.head.bias)
        return self.last(y.relu().permute(0, 3, 1, 2))  # type: ignore[no-any-return]


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row.squeeze() for row in self.stem(x).relu().split(1)]
        return self.last(torch.stack(rows))  # type: ignore[no-any-return]


def _one_left(model: nn.Module, seed: int) -> Masks:
    """Keep the first or the last channel of each layer but the last one."""
    masks: Masks = {}
    for name, module in layers(model):
        kept = torch.zeros(len(module.weight), dtype=torch.float64)
        kept[-seed] = 1
        if name != "last":
            weight = kept.view(-1, *[1] * (module.weight.ndim - 1)).expand(module.weight.shape)
            masks[name] = {"weight": weight, "bias": kept}
    return masks


def _trap(name: str, source: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Trap:
    example, *others = shapes
    uses = [once(*shape) for shape in others]
    return Trap(name, source, make, lambda _: torch.zeros(example).double(), uses, masks=_one_left)


TRAPS = [
    _trap("pooled features that are squeezed", "self.avgpool(x).squeeze()", _Pooled, (2, 3, 6, 6), (3, 3, 7, 6)),
    _trap(
        "pooled features that are squeezed along all but the batch",
        "torch.squeeze(x, dim=(1, 2, 3))",
        lambda: _Pooled(lambda x: x.squeeze((1, 2, 3))),
        (2, 3, 6, 6),
        (3, 3, 7, 6),
    ),
    _trap("a last state that is squeezed", "tutorials: fc(hidden.squeeze())", _LastState, (2, 4, 4), (3, 5, 4)),
    _trap("a weight that is squeezed", "F.linear(x, conv.weight.squeeze())", _Weight, (2, 3, 6, 6), (3, 3, 7, 6)),
    _trap("rows that are squeezed", "x.split(1), squeeze and stack", _Rows, (2, 3, 6, 6), (3, 3, 7, 6)),
]


def _any_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(squeezing, "_staying", lambda node: ())


ABLATIONS = [Ablation("dimensions that stay keep two entries", _any_size, "a last state that is squeezed")]
