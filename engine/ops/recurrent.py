"""Recurrent layers: all steps, layers and directions in one call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.ops.gates import (
    Cell,
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
from engine.program.graph import Node, Value
from engine.rule import Rare, Rule, Sample

__all__ = ["RULES"]


def _dead(cell: Cell, node: Node, constants: Constants, below: Tensor, first: Sequence[Tensor]) -> Dead:
    """The largest set of units that stay zero at every step.

    Args:
        cell, node: the weights, and the call.
        constants: constants of the weights.
        below: constants of the input.
        first: which entries of the initial states are zero; of an LSTM, the hidden state and the cell state.
    """
    state = torch.where(first[0], 0.0, math.nan)
    while True:
        units = silent(cell, constants, below, state, node.op == "gru") & first[-1]
        outputs = first[0]
        if cell.hr is None:
            outputs = outputs & units
        else:
            outputs = outputs & ~(~constants.zero(cell.hr).expand(cell.hr.shape) & ~units).any(1)
        after = torch.where(outputs, 0.0, math.nan)
        if torch.equal(after.isnan(), state.isnan()):
            return Dead(units, outputs)
        state = after


def _rows_of(constants: Constants, value: Value, layers: int) -> Tensor:
    """Which entries of a state are zero for the whole batch: bool, (layers, entries)."""
    zero = constants.plain(value) == 0
    zero = zero if zero.ndim < 3 else zero.all(1)
    return zero.expand(layers, value.shape[-1])


def _all_dead(node: Node, constants: Constants) -> list[list[Dead]]:
    """The dead units, by layer and direction."""
    x, layers = input_of(node), layers_of(node)
    below = constants.along(x, x.ndim - 1)
    if constants.has_profile(x):
        below = torch.where(below == 0, below, math.nan)
    count = sum(map(len, layers))
    first = [_rows_of(constants, value, count) for value in states_of(node)]
    dead_layers: list[list[Dead]] = []
    for layer in layers:
        place = sum(map(len, dead_layers))
        dead_layers.append(
            [_dead(c, node, constants, below, [f[place + i] for f in first]) for i, c in enumerate(layer)]
        )
        below = torch.where(torch.cat([dead.outputs for dead in dead_layers[-1]]), 0.0, math.nan)
    return dead_layers


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zero where a unit is dead; all other units vary."""
    dead_layers = _all_dead(node, constants)
    flat = [dead for layer in dead_layers for dead in layer]
    last = torch.cat([dead.outputs for dead in dead_layers[-1]]).view([1] * (node.output.ndim - 1) + [-1])
    rows = [torch.stack([d.outputs for d in flat]), torch.stack([d.units for d in flat])]
    states = [r.view(len(r), *[1] * (v.ndim - 2), -1) for r, v in zip(rows, node.outputs[1:], strict=False)]
    return [torch.where(zero, 0.0, math.nan) for zero in (last, *states)]


# ---------------------------------------------------------------- use


def _used(cell: Cell, dead: Dead, constants: Constants, outputs: Tensor, cells: Tensor) -> Used:
    """Used units, outputs and inputs of a cell; a unit that is zero at every step uses none of its inputs."""
    reads = links_of(cell, cell.hh, constants).any(0)
    while True:
        units = outputs
        if cell.hr is not None:
            units = (~constants.zero(cell.hr).expand(cell.hr.shape) & outputs[:, None]).any(0)
        units = (units | cells) & ~dead.units
        after = outputs | (reads & units[:, None]).any(0)
        if torch.equal(after, outputs):
            return Used(units, outputs, (links_of(cell, cell.ih, constants).any(0) & units[:, None]).any(0))
        outputs = after


def _all_used(node: Node, use: Use) -> list[list[Used]]:
    """What is used, by layer and direction."""
    layers, dead = layers_of(node), _all_dead(node, use.constants)
    count = sum(map(len, layers))
    states = [use[v].flatten(1, -2).any(1).expand(count, v.shape[-1]) for v in node.outputs[1:]]
    above = use.along(node.output, node.output.ndim - 1)
    used_layers: list[list[Used]] = []
    for depth in reversed(range(len(layers))):
        place = sum(map(len, layers[:depth]))
        parts = above.chunk(len(layers[depth]))
        used_layers.insert(0, [])
        for i, cell in enumerate(layers[depth]):
            cells = states[1][place + i] if len(states) > 1 else torch.zeros(len(dead[depth][i].units)).bool()
            read = parts[i] | states[0][place + i]
            used_layers[0].append(_used(cell, dead[depth][i], use.constants, read, cells))
        above = torch.stack([each.below for each in used_layers[0]]).any(0)
    return used_layers


def _use(node: Node, use: Use) -> None:
    x, layers, used_layers = input_of(node), layers_of(node), _all_used(node, use)
    above = torch.stack([each.below for each in used_layers[0]]).any(0)
    use.add(x, above.view([1] * (x.ndim - 1) + [-1]))
    flat = [each for layer in used_layers for each in layer]
    for cell, each in zip((cell for layer in layers for cell in layer), flat, strict=True):
        use_weights(cell, each, use)
    rows = [torch.stack([u.outputs | u.units if u.outputs.shape == u.units.shape else u.outputs for u in flat])]
    rows.append(torch.stack([u.units for u in flat]))
    for value, used in zip(states_of(node), rows, strict=False):
        use.add(value, used[:, None])


def _needs(node: Node, use: Use) -> Iterable[tuple[Value, int, Tensor]]:
    """Used units, and outputs that are read and not zero, have to be kept."""
    dead, used_layers = _all_dead(node, use.constants), _all_used(node, use)
    for cells, dead_units, used in zip(layers_of(node), dead, used_layers, strict=True):
        for cell, d, u in zip(cells, dead_units, used, strict=True):
            yield cell.ih, 0, u.units.repeat(cell.gates)
            yield cell.hh, 1, u.outputs & ~d.outputs


# ---------------------------------------------------------------- samples


class _Sequence(nn.Module):
    """A recurrent layer between two linear ones, read at the last step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 6), layer, nn.Linear(4, 3)
        self.hidden, self.out = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.layer(torch.tanh(self.first(x)))
        output: Tensor = self.out(torch.relu(self.hidden(self.last(steps[:, -1]))))
        return output


def _samples() -> Iterable[Sample]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield Sample(lambda kind=kind: _Sequence(kind(6, 4, batch_first=True)), (2, 4, 5), kind.__name__)  # type: ignore[misc]
    yield Sample(lambda: _Sequence(nn.RNN(6, 4, nonlinearity="relu", batch_first=True)), (2, 4, 5), "RNN with relu")


RULES = [
    Rule(
        ("gru", "lstm", "rnn_relu", "rnn_tanh"),
        unit_labels,
        _constants,
        _use,
        macs_of,
        attributes=attributes_of,
        inner=contractions_of,
        rare=Rare(needs=_needs, unchecked=True),
        samples=_samples,
    ),
]
