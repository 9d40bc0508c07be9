"""Recurrent cells: one step of one layer, called in a loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.ops.gates import (
    Dead,
    Used,
    attributes_of,
    contractions_of,
    input_of,
    layers_of,
    links_of,
    macs_of,
    silent,
    states_of,
    unit_labels,
    use_weights,
)
from engine.program.graph import Node
from engine.rule import Rare, Rule, Sample

__all__ = ["RULES"]


def _step(node: Node, constants: Constants) -> Dead:
    """Which units are zero after one step; as for a whole sequence, but from any initial state."""
    x, cell, states = input_of(node), layers_of(node)[0][0], states_of(node)
    rows = [constants.along(v, v.ndim - 1) for v in (x, *states)]
    rows = [
        torch.where(k == 0, k, math.nan) if constants.has_profile(v) else k
        for v, k in zip((x, *states), rows, strict=True)
    ]
    units = silent(cell, constants, rows[0], rows[1], node.op == "gru_cell")
    if not node.op.startswith("rnn"):
        units = units & (rows[-1] == 0)
    return Dead(units, units)


def _step_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    dead = torch.where(_step(node, constants).units, 0.0, math.nan)
    return [dead.view([1] * (v.ndim - 1) + [-1]) for v in node.outputs]


def _step_used(node: Node, use: Use) -> Used:
    cell, dead = layers_of(node)[0][0], _step(node, use.constants)
    units = torch.stack([use.along(v, v.ndim - 1) for v in node.outputs]).any(0) & ~dead.units
    reads, inputs = (links_of(cell, w, use.constants).any(0) for w in (cell.hh, cell.ih))
    own = units if node.op == "gru_cell" else torch.zeros_like(units)
    return Used(units, own | (reads & units[:, None]).any(0), (inputs & units[:, None]).any(0))


def _step_use(node: Node, use: Use) -> None:
    used = _step_used(node, use)
    for value, which in zip((input_of(node), *states_of(node)), (used.below, used.outputs, used.units), strict=False):
        use.add(value, which.view([1] * (value.ndim - 1) + [-1]))
    use_weights(layers_of(node)[0][0], used, use)


class _Steps(nn.Module):
    """A cell called step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(5, 6), cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in torch.tanh(self.first(x)).unbind(1):
            state = self.cell(step, state)
        output: Tensor = self.last(state[0] if isinstance(state, tuple) else state)
        return output


def _cell_samples() -> Iterable[Sample]:
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield Sample(lambda kind=kind: _Steps(kind(6, 4)), (2, 3, 5), kind.__name__)  # type: ignore[misc]
    yield Sample(lambda: _Steps(nn.RNNCell(6, 4, nonlinearity="relu")), (2, 3, 5), "RNNCell with relu")


RULES = [
    Rule(
        ("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
        unit_labels,
        _step_constants,
        _step_use,
        macs_of,
        attributes=attributes_of,
        inner=contractions_of,
        rare=Rare(unchecked=True),
        samples=_cell_samples,
    ),
]
