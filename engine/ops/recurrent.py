"""Recurrent layers and cells. Their units are left whole; what goes in and comes out is frozen, and counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.graph import Node, Value, walk_values
from engine.propagate import Labels
from engine.rule import Rule, Sample, Shapes

__all__ = ["RULES"]


def _labels(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"recurrent units are left whole ({node!r})")


def _weights(node: Node) -> list[Value]:
    stacked = node.args.get("params")
    named = [node.args[name] for name in ("w_ih", "w_hh") if name in node.args]
    return [v for v in walk_values(named if stacked is None else stacked) if v.ndim == 2]


def _macs(node: Node, shapes: Shapes) -> int:
    """Each weight is applied once per step and sample."""
    source = node.args.get("input", node.args.get("data"))
    return math.prod(shapes(source)[:-1]) * sum(math.prod(shapes(w)) for w in _weights(node))


class _Sequence(nn.Module):
    """A recurrent layer between two linear ones; the last state is what counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 6), layer, nn.Linear(4, 3)
        self.hidden, self.out = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.layer(torch.tanh(self.first(x)))
        found: Tensor = self.out(torch.relu(self.hidden(self.last(steps[:, -1]))))
        return found


def _samples() -> Iterable[Sample]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield Sample(lambda kind=kind: _Sequence(kind(6, 4, batch_first=True)), (2, 4, 5), kind.__name__)  # type: ignore[misc]
    yield Sample(lambda: _Sequence(nn.RNN(6, 4, nonlinearity="relu", batch_first=True)), (2, 4, 5), "RNN with relu")


class _Steps(nn.Module):
    """A cell called step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(5, 6), cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in torch.tanh(self.first(x)).unbind(1):
            state = self.cell(step, state)
        found: Tensor = self.last(state[0] if isinstance(state, tuple) else state)
        return found


def _cell_samples() -> Iterable[Sample]:
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield Sample(lambda kind=kind: _Steps(kind(6, 4)), (2, 3, 5), kind.__name__)  # type: ignore[misc]
    yield Sample(lambda: _Steps(nn.RNNCell(6, 4, nonlinearity="relu")), (2, 3, 5), "RNNCell with relu")


RULES = [
    Rule(("gru", "lstm", "rnn_relu", "rnn_tanh"), _labels, macs=_macs, unchecked=True, samples=_samples),
    Rule(
        ("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
        _labels,
        macs=_macs,
        unchecked=True,
        samples=_cell_samples,
    ),
]
