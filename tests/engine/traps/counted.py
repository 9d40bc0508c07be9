"""Traps: numbers of channels among what a model returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.verification import results
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Described(nn.Module):
    """Returns its result, and something about the features behind it."""

    def __init__(self, describe: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.describe = describe
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.stem(x).relu()
        return {"logits": self.head(y), "about": self.describe(y)}


def _shape(y: Tensor) -> torch.Size:
    return y.shape


def _count(y: Tensor) -> int:
    return y[0].numel()


def _place(y: Tensor) -> tuple[int, ...]:
    return tuple(y.shape[-2:])


def _by_text(y: Tensor) -> int:
    return int(f"{y.shape[1]}")


def _trap(name: str, source: str, describe: Callable[[Tensor], Any], **more: Any) -> Trap:
    uses = [once(1, 3, 5, 7), once(3, 3, 4, 4)]
    return Trap(name, source, lambda: _Described(describe), lambda _: torch.zeros(2, 3, 6, 6).double(), uses, **more)


TRAPS = [
    _trap("a shape of features as output", "return feats, feats.shape, detectors", _shape, kept="how many channels"),
    _trap("a number of entries as output", "numel() in statistics", _count, kept="how many channels"),
    _trap("a width by way of a text", "meta = f'{c}x{h}x{w}'; parsed again", _by_text, refused="integer"),
    _trap("a resolution as output", "return tokens, (H, W), Swin and PVT", _place, shrinks=True),
]


def _floats_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "_whole_numbers", lambda out: ())


ABLATIONS = [Ablation("whole numbers among outputs are compared", _floats_alone, "a width by way of a text")]
