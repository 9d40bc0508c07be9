"""Traps: strides, dilations and margins of torch's layers that a method of the model sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.traps.trap import Trap, Use, once

__all__ = ["TRAPS"]


class _Adjustable(nn.Module):
    """A layer between others, of which a method sets numbers."""

    def __init__(self, layer: Callable[[], nn.Module], name: str) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer, self.head, self.name = layer(), nn.Conv2d(8, 2, 1), name

    def adjust(self, number: int) -> None:
        """Set the number for both directions."""
        if self.name == "dilation":
            self.layer.dilation = (number, number)
            self.layer.padding = (number, number)
        elif self.name == "stride":
            self.layer.stride = (number, number)
        else:
            self.layer.padding = (number, number)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map."""
        y: Tensor = self.layer(self.norm(self.stem(x)).relu())
        return self.head(y.relu())  # type: ignore[no-any-return]


def _at(number: int) -> Use:
    def use(model: nn.Module) -> Any:
        model.adjust(number)
        return once(3, 3, 9, 7)(model)

    return use


def _trap(name: str, source: str, layer: Callable[[], nn.Module], number: str, *others: int) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=lambda: _Adjustable(layer, number),
        example=lambda _: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=[_at(other) for other in others],
        shrinks=True,
    )


TRAPS = [
    _trap(
        "a dilation that a method sets",
        "CSAILVision/semantic-segmentation-pytorch models.py ResnetDilated._nostride_dilate",
        lambda: nn.Conv2d(8, 8, 3, padding=1),
        "dilation",
        2,
        1,
    ),
    _trap("a padding that a method sets", "the same", lambda: nn.Conv2d(8, 8, 3), "padding", 1, 0),
    _trap(
        "a stride of a layer per channel",
        "the same",
        lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "stride",
        2,
        1,
    ),
    _trap(
        "a stride of a transposed layer",
        "upsampling by a factor that a method sets",
        lambda: nn.ConvTranspose2d(8, 8, 1),
        "stride",
        2,
        1,
    ),
]
