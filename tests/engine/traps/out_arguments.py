"""Traps: results in memory that is there already, which torch's functions take as `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.recording import recorder
from tests.engine.traps.entering import Net as Layers
from tests.engine.traps.entering import noise
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

Step = Callable[[Tensor, nn.Module], Tensor]


class _Net(Layers):
    """Two layers, and a step on the features between them."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.between = step, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Enter, step, leave."""
        return self.leave(self.step(self.features(x), self.between))


def _product(h: Tensor, layer: Any) -> Tensor:
    return torch.mul(layer(h), h, out=torch.zeros_like(h))


def _sum(h: Tensor, layer: Any) -> Tensor:
    return torch.add(layer(h), 0.5, out=torch.zeros_like(h))


def _twice(h: Tensor, layer: Any) -> Tensor:
    memory = torch.empty_like(h)
    torch.mul(layer(h), h, out=memory)
    torch.add(memory, 0.5, out=memory)
    return memory


def _linear(h: Tensor, layer: Any) -> Tensor:
    return torch.addmm(layer.bias, h, layer.weight.t(), out=torch.zeros_like(h))


def _batched(h: Tensor, layer: Any) -> Tensor:
    weight = layer.weight.t().expand(len(h), -1, -1)
    return torch.bmm(h[:, None], weight, out=torch.zeros_like(h[:, None]))[:, 0]


def _part(h: Tensor, layer: Any) -> Tensor:
    memory = torch.zeros_like(h)
    torch.sigmoid(layer(h)[:, :4], out=memory[:, 4:])
    return memory


def _several(h: Tensor, layer: Any) -> Tensor:
    values, places = torch.zeros_like(h), torch.zeros_like(h, dtype=torch.int64)
    torch.sort(layer(h), 0, out=(values, places))
    return values + h


def _empty(h: Tensor, layer: Any) -> Tensor:
    return torch.mul(layer(h), h, out=h.new_empty(0))


def _trap(name: str, source: str, step: Step, shrinks: bool | str = True) -> Trap:
    return Trap(
        name=name, source=source, make=lambda: _Net(step), example=lambda _: noise(2),
        uses=[once(2, 4), once(5, 4, seed=2)], shrinks=shrinks,
    )  # fmt: skip


TRAPS = [
    _trap("a product written over zeros", "torch.mul(a, b, out=buffer)", _product),
    _trap("a sum written over zeros", "torch.add(a, 0.5, out=buffer)", _sum),
    _trap("a result written over its operand", "torch.add(buffer, 0.5, out=buffer)", _twice),
    _trap("a linear layer written over zeros", "torch.addmm(bias, x, w.t(), out=buffer)", _linear),
    _trap("batches of products written over zeros", "torch.bmm(x, w, out=buffer)", _batched, shrinks=False),
    _trap("a result written to a part", "torch.sigmoid(x, out=buffer[:, 4:])", _part, shrinks=False),
    _trap("two results written over zeros", "torch.sort(x, 0, out=(values, indices))", _several, shrinks=False),
    _trap("a result that sizes its memory", "torch.mul(a, b, out=h.new_empty(0))", _empty),
]


def _operands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorder, "without_out", lambda func: None)


ABLATIONS = [
    Ablation("what an `out` argument held is no operand", _operands, "a product written over zeros"),
]
