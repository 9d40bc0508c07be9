"""Traps: tensors that leave the network by another way than a tensor in a tuple."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.traps.trap import Trap, once

__all__ = ["TRAPS"]


class _Namespace(nn.Module):
    """Returns a plain namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).relu()
        return SimpleNamespace(logits=self.head(hidden), features=hidden)


def _attributes(shape: tuple[int, ...]) -> Any:
    call = once(*shape)
    return lambda model: vars(call(model))


TRAPS = [
    Trap(
        name="a namespace as output",
        source="types.SimpleNamespace, as in fairseq's and many research models' outputs",
        make=_Namespace,
        example=lambda model: torch.zeros(2, 3, 6, 6, dtype=torch.float64),
        uses=[_attributes((3, 3, 9, 7))],
    ),
]
