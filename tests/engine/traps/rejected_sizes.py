"""Traps: code that decides by a size, in models that reject the first sizes that are tried along that axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives.axes import larger
from engine.alternatives.other_sizes import OtherSizes
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Pairs(nn.Module):
    """Compares neighbours in the batch, which takes at least two; scores are pooled where there are more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        gap = (y[0] - y[1]).abs().mean((1, 2))
        if len(x) > 2:
            return torch.cat([self.head(y).flatten(1), gap.expand(len(x), -1)], 1)
        return self.head(y).flatten(1)


class _Lines(nn.Module):
    """Reads lines of text of one height; long ones take a further layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows, self.long, self.head = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Linear(64, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu().permute(0, 3, 1, 2).flatten(2)
        y = self.rows(y).relu()
        if y.shape[1] > 20:
            y = y + self.long(y)
        return self.head(y)  # type: ignore[no-any-return]


class _FullTable(nn.Module):
    """Tokens up to the length of the table of positions, which the example has; short texts take a further layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 12, 8))
        self.short, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= 12
        y = (self.embed(x) + self.places[:, : x.shape[1]]).relu()
        if x.shape[1] < 8:
            y = y + self.short(y)
        return self.head(y)  # type: ignore[no-any-return]


def _head_alone(model: nn.Module, seed: int) -> Masks:
    """Mask a head as a whole: nothing that it reads counts, but for other readers."""
    return {"head": {"weight": torch.zeros_like(model.head.weight)}}  # type: ignore[arg-type, union-attr]


def _trap(name: str, source: str, make: Any, shape: tuple[int, ...], *others: tuple[int, ...], **more: Any) -> Trap:
    return Trap(name, source, make, lambda _: torch.zeros(shape).double(), [once(*s) for s in (shape, *others)], **more)


TRAPS = [
    _trap(
        "a batch of at least two",
        "pairs in a batch, DiffAugment and contrastive losses",
        _Pairs,
        *[(2, 3, 6, 6), (3, 3, 6, 6), (5, 3, 4, 7)],
        masks=_head_alone,
    ),
    _trap("lines of one height", "CRNN, Shi et al. 2015", _Lines, (2, 1, 8, 16), (1, 1, 8, 40), (2, 1, 8, 21)),
    _trap("as many tokens as positions", "BERT, nanoGPT: block_size", _FullTable, (2, 12, 3), (2, 5, 3), (1, 7, 3)),
]


def _first_try_only(patch: pytest.MonkeyPatch) -> None:
    def first(self: OtherSizes, group: Any, accepts: Any) -> Any:
        sizes = {axis: 1 if axis.batch else larger(axis.size) for axis in group}
        return [group] if group and accepts(sizes) else []

    patch.setattr(OtherSizes, "_taken", first)


ABLATIONS = [Ablation("further sizes where the first is rejected", _first_try_only, "a batch of at least two")]
