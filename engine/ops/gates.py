"""Weights of recurrent layers and cells, which have one row per gate for each hidden unit.

A hidden unit is one slot: the rows of all its gates, its recurrent column, the columns of its consumers. It can be
removed if it stays exactly zero from a zero initial state on, which depends on one gate only:

- LSTM: the cell state stays zero if the input of ``g = tanh(…)`` is zero, whatever the other gates do.
- GRU: likewise for ``n = tanh(W x + b + r (U h + c))``, where both sums must be zero separately because ``r`` varies.
- RNN: the input of the nonlinearity.

A unit that no consumer reads can be removed in any case. Layers and directions share one `hidden_size`, so they keep
equally many units, but not necessarily the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.constraints import Equal, Fewer, NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value, walk_values
from engine.rule import Shapes

__all__ = [
    "Cell",
    "Dead",
    "Used",
    "attributes_of",
    "contractions_of",
    "input_of",
    "layers_of",
    "links_of",
    "macs_of",
    "silent",
    "states_of",
    "unit_labels",
    "use_weights",
]

# Number of gates, and index of the gate that has to be zero for a unit to be zero.
_GATES = {"gru": (3, 2), "lstm": (4, 2), "rnn_relu": (1, 0), "rnn_tanh": (1, 0)}


@dataclass(frozen=True, eq=False)
class Cell:
    """The weights of one layer and direction.

    Attributes:
        ih, hh: weights applied to the input and to the state, ``(gates * units, …)``.
        biases: the biases of these two, or empty.
        hr: the projection of the units onto the output, or None.
        gates: number of gates.
        key: index of the gate that makes a unit zero.
    """

    ih: Value
    hh: Value
    biases: tuple[Value, ...]
    hr: Value | None
    gates: int
    key: int

    def weights(self) -> list[Value]:
        """Return all weights that contract."""
        return [self.ih, self.hh, *([] if self.hr is None else [self.hr])]

    def by_gate(self, value: Value, array: Tensor) -> Tensor:
        """View an array over the rows of all gates as (gates, units, …)."""
        return array.expand(value.shape).unflatten(0, (self.gates, -1))


def input_of(node: Node) -> Value:
    """The input, packed or not."""
    value: Value = node.args["input"] if "input" in node.args else node.args["data"]
    return value


def _kind(node: Node) -> tuple[int, int]:
    return _GATES[node.op.removesuffix("_cell")]


def states_of(node: Node) -> list[Value]:
    """The initial states; of an LSTM the hidden state first, then the cell state."""
    return list(walk_values(node.args["hx"]))


def layers_of(node: Node) -> list[list[Cell]]:
    """The cells by layer and direction."""
    if "w_ih" in node.args:
        biases = tuple(b for name in ("b_ih", "b_hh") if (b := node.args[name]) is not None)
        return [[Cell(node.args["w_ih"], node.args["w_hh"], biases, None, *_kind(node))]]
    params, directions = list(walk_values(node.args["params"])), 1 + node.args["bidirectional"]
    count = len(params) // (node.args["num_layers"] * directions)
    cells = []
    for start in range(0, len(params), count):
        ih, hh, *rest = params[start : start + count]
        biases = tuple(v for v in rest if v.ndim == 1)
        cells.append(Cell(ih, hh, biases, next((v for v in rest if v.ndim == 2), None), *_kind(node)))
    return [cells[start : start + directions] for start in range(0, len(cells), directions)]


def contractions_of(node: Node) -> Sequence[Contraction]:
    """The first layer contracts the input; all other contractions are internal, where weights stand in for values."""
    x, layers = input_of(node), layers_of(node)
    states = states_of(node) if "w_ih" in node.args else []
    contractions = []
    for depth, cell in ((depth, cell) for depth, layer in enumerate(layers) for cell in layer):
        for weight in cell.weights():
            source, dim = weight, 1
            bias = None if weight is cell.hr or not cell.biases else cell.biases[weight is cell.hh]
            if weight is cell.ih:
                source, dim = (x, x.ndim - 1) if depth == 0 else (weight, 1)
            elif states:
                source, dim = states[0], states[0].ndim - 1
            contractions.append(Contraction(source, weight, bias, weight, dim, 0, 1, False, False))
    return contractions


# ---------------------------------------------------------------- labels


def unit_labels(node: Node, labels: Labels) -> None:
    """One slot per hidden unit, layer by layer; a layer's outputs are the columns of the next layer."""
    x, layers = input_of(node), layers_of(node)
    if not all(v.stored for layer in layers for cell in layer for v in (*cell.weights(), *cell.biases)):
        for value in (*node.inputs, *node.outputs):
            labels.freeze(value, f"the weights of {node!r} are computed")
        return
    labels.without(x, range(x.ndim - 1), f"{node!r} runs over it")
    below = labels.along(x, x.ndim - 1)
    if below is not None:
        labels.constraints.append(NonEmpty(below))
    units: list[Tensor] = []
    outputs: list[Tensor] = []
    for layer in layers:
        last: list[Tensor] = []
        for cell in layer:
            inner = _rows(cell.ih, cell.gates, labels)
            outer = inner if cell.hr is None else _rows(cell.hr, 1, labels)
            _tie_cell(cell, below, inner, outer, labels)
            units.append(inner)
            outputs.append(outer)
            last.append(outer)
        below = torch.cat(last)
    _tie_counts(torch.stack(outputs), torch.stack(units), labels)
    _tie_states(node, torch.stack(outputs), torch.stack(units), labels)
    if "w_ih" not in node.args:
        labels.add(node.output, torch.cat(outputs[-len(layers[-1]) :]).view([1] * (node.output.ndim - 1) + [-1]))


def _rows(weight: Value, gates: int, labels: Labels) -> Tensor:
    """The slots of the units whose rows a weight has, ``(units,)``."""
    slots = labels.along(weight, 0)
    if slots is not None:
        rows = slots.view(gates, -1)
        labels.slots.union(rows, rows[:1])
        return rows[0]
    fresh = labels.slots.new(weight.shape[0] // gates)
    labels.born.append(fresh)
    labels.constraints.append(NonEmpty(fresh))
    return fresh


def _tie_cell(cell: Cell, below: Tensor | None, units: Tensor, outputs: Tensor, labels: Labels) -> None:
    stacked = units.repeat(cell.gates)
    for value in (cell.ih, cell.hh, *cell.biases):
        labels.add(value, stacked.view([-1] + [1] * (value.ndim - 1)))
    if below is None:
        labels.fix(cell.ih, 1)
    else:
        labels.add(cell.ih, below[None])
    labels.add(cell.hh, outputs[None])
    if cell.hr is not None:
        labels.add(cell.hr, outputs[:, None])
        labels.add(cell.hr, units[None])


def _tie_counts(outputs: Tensor, units: Tensor, labels: Labels) -> None:
    """Keep equally many units in all layers and directions; torch recognises a projection by its smaller size."""
    for rows in (units, *([] if outputs.shape == units.shape else [outputs])):
        if len(rows) > 1:
            labels.constraints.append(Equal(rows))
            labels.ragged.append(rows)
    if outputs.shape != units.shape:
        labels.constraints.append(Fewer(outputs[0], units[0]))


def _tie_states(node: Node, outputs: Tensor, units: Tensor, labels: Labels) -> None:
    """Each layer and direction has its own state; labels of initial states propagate from where they are created."""
    states, after = states_of(node), node.outputs if "w_ih" in node.args else node.outputs[1:]
    for value, final_state, rows in zip(states, after, (outputs, units), strict=False):
        joint = rows.view(1, -1) if value.ndim == 2 else rows[:, None, :]
        labels.add(
            final_state, rows.view(len(rows), *[1] * (final_state.ndim - 2), -1)
        )  # torch 2.6 records one dimension more
        for layer in labels.layers(value):
            if layer.size(-1) == 1:
                labels.slots.freeze(layer, f"{node!r} runs over it")
            else:
                labels.tie(layer, [value.ndim - 2])
        if _is_zero(labels.graph, value):  # zeros of any size will do
            slots = labels.along(value, value.ndim - 1)
            if slots is not None:
                labels.slots.union(slots, rows[0])
        elif any(layer.size(-1) > 1 for layer in labels.layers(value)):
            labels.add(value, joint)
        elif value.stored:
            labels.add(value, labels.tie(joint, range(value.ndim - 1)))
        else:
            labels.slots.freeze(rows, f"{node!r} starts from a state of fixed size")


def _is_zero(graph: Graph, value: Value) -> bool:
    """Whether a value consists of zeros, created at a size that can follow."""
    while value.producer is not None and graph.nodes[value.producer].op in ("_to_copy", "detach", "to"):
        value = graph.nodes[value.producer].inputs[0]
    return value.producer is not None and graph.nodes[value.producer].op in ("new_zeros", "zeros")


# ---------------------------------------------------------------- what is zero, and what is used


def silent(cell: Cell, constants: Constants, below: Tensor, state: Tensor, is_separate: bool) -> Tensor:
    """Which units have a key gate whose input is zero: bool, (units,).

    Args:
        cell: the weights.
        constants: constants of the weights.
        below, state: constants of the input and of the state, NaN where they vary.
        is_separate: whether the sums over the two have to be zero separately.
    """
    parts = []
    for position, (weight, row) in enumerate(((cell.ih, below), (cell.hh, state))):
        links = links_of(cell, weight, constants)[cell.key]
        filled = row.nan_to_num(0.0)
        total = torch.zeros(len(links), dtype=torch.float64)
        if filled.any():
            total = torch.where(filled == 0, 0.0, cell.by_gate(weight, constants[weight])[cell.key] * filled).sum(1)
        if cell.biases:
            total = total + cell.by_gate(cell.biases[position], constants[cell.biases[position]])[cell.key]
        parts.append(total.masked_fill((links & row.isnan()).any(1), math.nan))
    silent = (parts[0] == 0) & (parts[1] == 0) if is_separate else parts[0] + parts[1] == 0
    return silent | _masked_units(cell, constants) if constants.repaired else silent


def links_of(cell: Cell, weight: Value, constants: Constants) -> Tensor:
    """Where a weight is nonzero: bool, (gates, units, columns)."""
    return cell.by_gate(weight, ~constants.zero(weight))


def _masked_units(cell: Cell, constants: Constants) -> Tensor:
    """Which units have a key gate that is masked in every masked weight: repair masks the rest of the unit."""
    weights = [constants.zero(w) for w in (cell.ih, cell.hh)]
    closed = [~links_of(cell, w, constants)[cell.key].any(1) for w in (cell.ih, cell.hh)]
    masked = [bool(zero.any()) for zero in weights]
    all_masked = torch.stack([c if m else torch.ones_like(c) for c, m in zip(closed, masked, strict=True)]).all(0)
    return all_masked if any(masked) else torch.zeros_like(all_masked)


@dataclass(frozen=True, eq=False)
class Dead:
    """Units of a cell, and outputs of it, that are zero at every step."""

    units: Tensor
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class Used:
    """Units of a cell that matter, outputs of it that are read, and inputs that it reads."""

    units: Tensor
    outputs: Tensor
    below: Tensor


def use_weights(cell: Cell, used: Used, use: Use) -> None:
    """Mark the rows of used units, so that they propagate to the consumers of the inputs."""
    for weight in (cell.ih, cell.hh):
        use.add(weight, used.units.repeat(cell.gates)[:, None])
    if cell.hr is not None:
        use.add(cell.hr, used.outputs[:, None])


# ---------------------------------------------------------------- sizes


def attributes_of(node: Node, shapes: Shapes) -> Mapping[str, int]:
    """`proj_size` is 0 if there is no projection, and left alone then."""
    cell = layers_of(node)[0][0]
    sizes = {"input_size": shapes(cell.ih)[1], "hidden_size": shapes(cell.ih)[0] // cell.gates}
    return sizes if cell.hr is None else {**sizes, "proj_size": shapes(cell.hr)[0]}


def macs_of(node: Node, shapes: Shapes) -> int:
    """Each weight is applied once per step and sample."""
    weights = [w for layer in layers_of(node) for cell in layer for w in cell.weights()]
    return math.prod(shapes(input_of(node))[:-1]) * sum(math.prod(shapes(w)) for w in weights)
