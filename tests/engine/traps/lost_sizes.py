"""Traps: a number that follows from the number of channels, of which Python keeps no trace: `0.5 * h.shape[1]`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from engine.running import provenance
from tests.engine.traps.entering import Net as Layers
from tests.engine.traps.entering import noise
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

Step = Callable[[Tensor], Any]


class _Net(Layers):
    """Three layers; the features of the second one are scaled."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.between = step, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Enter, scale, leave."""
        return self.leave(self.step(self.between(self.features(x))))


def _left(h: Tensor) -> Tensor:
    return h * (0.5 * h.shape[1])


def _quotient(h: Tensor) -> Tensor:
    scale = 1.0 / h.size(-1)
    return h * scale


def _unpacked(h: Tensor) -> Tensor:
    _, width = h.shape
    scale = 1.0
    scale *= 0.5 * width
    return h * scale


def _array(h: Tensor) -> Tensor:
    return h * float(np.zeros(h.shape).shape[-1])


def _stride(h: Tensor) -> Tensor:
    return h * h.stride(0)


def _bytes(h: Tensor) -> Tensor:
    return h * h[:1].nbytes


def _view(h: Tensor) -> Tensor:
    return h * (0.5 * h.T.shape[0])


def _text(h: Tensor) -> Tensor:
    return h * float(f"{h.shape[1]}")


def _length(h: Tensor) -> Tensor:
    return h * len([0] * h.shape[1])


def _index(h: Tensor) -> Tensor:
    return h.mul(operator.index(h.shape[1]))


def _scaled(h: Tensor, scale: float) -> Tensor:
    return h * scale


def _passed(h: Tensor) -> Tensor:
    return _scaled(h, 2.0 ** -h.shape[1])


def _width_of(h: Tensor) -> float:
    return 3.0 / h.shape[1]


def _helper(h: Tensor) -> Tensor:
    return h * _width_of(h)


def _coerced(h: Tensor) -> Tensor:
    width = h.shape[1]
    return h * type(width)(width)


def _remainder(h: Tensor) -> Tensor:
    return h * pow(h.shape[1], 3, 7)


def _batch(h: Tensor) -> Tensor:
    return h * (0.5 * h.shape[0]) * (1.0 / len(h))


def _trap(name: str, source: str, step: Step) -> Trap:
    return Trap(
        name=name, source=source, make=lambda: _Net(step), example=lambda _: noise(2),
        uses=[once(2, 4), once(5, 4, seed=2)], shrinks=True,
    )  # fmt: skip


TRAPS = [
    _trap("half of a width", "x * (0.5 * x.shape[1])", _left),
    _trap("one over a width", "scale = 1.0 / x.size(-1)", _quotient),
    _trap("a factor that a width changes", "scale *= 0.5 * dim", _unpacked),
    _trap("a width of an array", "np.zeros(x.shape)", _array),
    _trap("a width by a stride", "x.stride(0)", _stride),
    _trap("a width in bytes", "x.nbytes", _bytes),
    _trap("half of a width of a view", "x * (0.5 * x.T.shape[0])", _view),
    _trap("a width that is printed and read", "float(f'{x.shape[1]}')", _text),
    _trap("a width by the length of a list", "len([0] * x.shape[1])", _length),
    _trap("a width as an index", "operator.index(x.shape[1])", _index),
    _trap("a width that is passed on", "scaled(x, 2.0 ** -x.shape[1])", _passed),
    _trap("a width in a helper", "x * scale_of(x)", _helper),
    _trap("a width by the type of a number", "type(n)(n), as in statistics and fractions", _coerced),
    _trap("a width to a power, and what remains", "pow(n, k, p)", _remainder),
    _trap("half of a batch", "x * (0.5 * x.shape[0])", _batch),
]


def _not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(provenance, "lost_sizes", lambda numbers, frame, tag: [])


ABLATIONS = [
    Ablation("numbers that follow from a width without a trace", _not_looked_for, "half of a width", repaired=True),
]
