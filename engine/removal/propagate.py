"""Propagate slot labels through a graph by its rules: labels, constraints, and frozen slots with reasons."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.analysis.amounts import Amounts
from engine.analysis.constraints import Constraint
from engine.analysis.labels import Labels, is_made_of
from engine.analysis.layers import Layers
from engine.analysis.slots import Slots
from engine.analysis.uncertain import amounts, are_spatial, dims_of
from engine.program.arrays import support
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node, Value, rule_errors
from engine.rule import Registry

__all__ = ["Structure", "propagate", "resolve"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class Structure:
    """Slots of a model, and how they are tied.

    Attributes:
        graph, rules: what it was derived from.
        layers: value index -> its label arrays, whose entries are representatives.
        constraints: on representatives.
        roots: representative of each slot.
        frozen: per slot, whether it must not be removed.
        born: per slot, whether it is an output of a contraction; no other slots are ever removed.
        slots: the union-find, which holds the reasons.
        unsafe: per slot, whether removing it breaks a size written in the code.
        ragged: rows that keep equally many slots, but not the same ones; tensors of them are not products.
        masked_tables: names of the buffers that masks of channels zero, or what they are added to would vary.
    """

    graph: Graph
    rules: Registry
    layers: Mapping[int, tuple[Tensor, ...]]
    constraints: tuple[Constraint, ...]
    roots: Tensor
    frozen: Tensor
    born: Tensor
    slots: Slots
    unsafe: Tensor
    ragged: frozenset[tuple[int, ...]] = frozenset()
    masked_tables: frozenset[str] = frozenset()

    def of(self, value: Value) -> tuple[Tensor, ...]:
        """Return the label arrays of a value."""
        return self.layers.get(value.index, ())

    def along(self, value: Value, dim: int) -> Tensor | None:
        """Return the slots along one dimension, shape ``(size,)``, or None."""
        for layer in self.of(value):
            touched = support(layer)
            if dim in touched:
                if self.ragged and dim != touched[-1] and is_made_of(self.ragged, layer):
                    continue  # every row keeps a slot
                for other in touched:
                    layer = layer if other == dim else layer.narrow(other, 0, 1)
                return layer.reshape(-1)
        return None

    @functools.cached_property
    def amounts(self) -> Amounts:
        """Numeric arguments that depend on a size other than a number of a layer's outputs."""
        return Amounts.of(self.graph, self._is_channel)

    def _is_channel(self, value: Value, dim: int) -> bool:
        slots = self.along(value, dim)
        return slots is not None and bool(self.born[slots].any())

    def free(self) -> Tensor:
        """Return a bool per slot: representatives that the structure allows to be removed."""
        return ~self.frozen & self.born & (self.roots == torch.arange(len(self.roots)))

    @functools.cached_property
    def table(self) -> Layers:
        """All label arrays, concatenated."""
        return Layers(self.layers)

    @functools.cached_property
    def magnitudes(self) -> Mapping[int, Value]:
        """Index of a computed weight -> the scales that masks of its outputs apply to (weight norm)."""
        return {c.weight.index: scale for c, (scale, _, dim) in self._scaled if dim == c.transposed}

    @functools.cached_property
    def unmasked(self) -> frozenset[tuple[int, int]]:
        """(index, dimension) of stored values that such masks do not cover: directions, and the scales of inputs."""
        directions = ((direction.index, dim) for _, (_, direction, dim) in self._scaled)
        return frozenset((*directions, *((s.index, dim) for c, (s, _, dim) in self._scaled if dim != c.transposed)))

    @functools.cached_property
    def _scaled(self) -> list[tuple[Contraction, tuple[Value, Value, int]]]:
        pairs = []
        for _, c in self.contractions():
            maker = None if c.weight.producer is None else self.graph.nodes[c.weight.producer]
            scaled = None if maker is None else self.rules.of(maker).rare.magnitude(maker)
            pairs += [] if scaled is None else [(c, scaled)]
        return pairs

    @functools.cached_property
    def tables(self) -> frozenset[int]:
        """Indices of stored values from which an op other than a contraction produces channels: embeddings."""
        put_out = (n for n in self.graph.nodes if any(True for _ in self.rules.of(n).rare.produces(n)))
        return frozenset(v.index for node in put_out for v in node.inputs if v.stored)

    @functools.cached_property
    def attributes(self) -> list[tuple[Node, Mapping[str, int]]]:
        """Nodes whose sizes are attributes of their module, with these attributes as recorded."""
        pairs: list[tuple[Node, Mapping[str, int]]] = []
        for node in self.graph.nodes:
            asked = {} if self._reversed(node) else self.rules.of(node).attributes(node, lambda value: value.shape)
            have = self.graph.attributes.get(node.module, {}) if asked else {}
            own = {name: size for name, size in asked.items() if have.get(name) == size}
            if own:
                pairs.append((node, own))
        return pairs

    def _reversed(self, node: Node) -> bool:
        """Whether a node uses the weight of a convolution in the opposite direction of the layer itself."""
        kind = self.graph.types.get(node.module, nn.Module)
        transposed = issubclass(kind, _TRANSPOSED)
        is_layer = transposed or issubclass(kind, _CONVOLUTIONS)
        return is_layer and any(c.transposed != transposed for c in self.rules.contractions(node))

    def contractions(self) -> list[tuple[Node, Contraction]]:
        """Return the nodes that contract channels with a weight, with their contractions."""
        return self._contractions

    @functools.cached_property
    def _contractions(self) -> list[tuple[Node, Contraction]]:
        return [(node, c) for node in self.graph.nodes for c in self.rules.contractions(node)]


def _resolved(labels: Labels, roots: Tensor) -> dict[int, tuple[Tensor, ...]]:
    """Return the layers of values by index, with representatives; shared layers stay shared."""
    resolved: dict[int, Tensor] = {}
    layers_by_index: dict[int, tuple[Tensor, ...]] = {}
    for value in labels.graph.values:
        layers = labels.layers(value)
        for layer in layers:
            if id(layer) not in resolved:
                resolved[id(layer)] = roots[labels.settled(layer)]
        if layers:
            layers_by_index[value.index] = tuple(resolved[id(layer)] for layer in layers)
    return layers_by_index


def resolve(labels: Labels, rules: Registry) -> Structure:
    """Return the structure described by labels that are complete, under the rules that wrote them."""
    roots = labels.slots.roots()
    frozen = labels.slots.frozen(roots)
    born, unsafe = torch.zeros(2, len(roots), dtype=torch.bool)
    for slots in labels.born:
        born[roots[slots]] = True
    for slots in labels.unsafe:
        unsafe[roots[slots]] = True
    return Structure(
        graph=labels.graph,
        rules=rules,
        layers=_resolved(labels, roots),
        constraints=tuple(c.resolve(roots) for c in labels.constraints),
        roots=roots,
        frozen=frozen,
        born=born,
        slots=labels.slots,
        unsafe=unsafe,
        ragged=frozenset(tuple(row) for rows in labels.ragged for row in roots[rows].tolist()),
    )


def _beside_missed(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yield nodes in those modules of a list that ran, where the data decide which ones run: experts of a mixture.

    The inputs and outputs of the modules that did not run are unknown, and their parameters would not be narrowed.
    """
    containers = {name for name, kind in graph.types.items() if issubclass(kind, (nn.ModuleList, nn.ModuleDict))}
    own = {name: parts for name in graph.aliases if (parts := _inside(name, containers))} if graph.decided else {}
    ran = {item for name, parts in own.items() if graph.aliases[name] in graph.stored for item in parts}
    missed = {item[0]: item[1] for parts in own.values() for item in parts if item not in ran}
    for node in graph.nodes:
        for container, _ in _inside(f"{node.module}.", containers & missed.keys()):
            yield node, f"{container}.{missed[container]}"


def _inside(name: str, containers: Collection[str]) -> list[tuple[str, str]]:
    """Return (container, key) for each container that contains a name."""
    parts = name.split(".")
    pairs = ((".".join(parts[:i]), parts[i]) for i in range(len(parts) - 1))
    return [(container, key) for container, key in pairs if container in containers]


def _hold_amounts(
    node: Node, names: Sequence[str], labels: Labels, preserved: Mapping[int, int], beside: Sequence[Value | None]
) -> None:
    """Freeze the dimensions along which a node takes an amount that may differ in another call.

    Args:
        node: the node that takes the amount.
        names: names of the arguments that hold amounts.
        labels: labels of the graph.
        preserved: pairs of dimensions that none of the arguments concerns.
        beside: weights and biases, along whose channels no amount is taken.
    """
    dims = dims_of(node, names, preserved)
    reason = f"{node!r} takes an amount of it that may differ in another call"
    for value in (*(value for value in node.inputs if value not in beside), *node.outputs):
        if preserved and value not in node.inputs:
            concerned = set(range(value.ndim)).difference(preserved.values())
        elif dims is not None and value.ndim == node.inputs[0].ndim:
            concerned = set(dims)
        else:
            labels.freeze(value, reason)
            labels.unsafe += labels.layers(value)
            continue
        for row in (labels.along(value, dim) for dim in sorted(concerned)):
            if row is not None:
                labels.slots.freeze(row, reason)
                labels.unsafe.append(row)


def propagate(graph: Graph, rules: Registry) -> Structure:
    """Propagate slot labels through a graph.

    Args:
        graph: the recorded program.
        rules: rules by op; an op without a rule freezes its inputs and outputs.

    Returns:
        The label arrays of all values. Slots that reach an output of the model are frozen.

    Example:
        >>> from torch import nn
        >>> import engine
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> structure = propagate(engine.trace(net, torch.zeros(1, 3, 8, 8)), engine.RULES)
        >>> int(structure.free().sum())  # the four outputs of the first convolution
        4
    """
    labels = Labels(graph)
    for node in graph.nodes:
        labels.node = node
        with rule_errors(node):
            rule = rules.of(node)
            rule.labels(node, labels)
            if node.outputs and not rule.rare.lends:
                labels.fix_unclaimed(node)
        if names := amounts(node, graph.uncertain.get(node.index, ()), rule.rare.for_gradients):
            beside = [value for c in rules.contractions(node) if are_spatial(names) for value in (c.weight, c.bias)]
            _hold_amounts(node, names, labels, rule.rare.preserved(node, graph), beside)
    for value in graph.outputs:
        labels.freeze(value, graph.exits.get(value.index, "is an output of the model"))
    for node, missed in _beside_missed(graph):
        for value in (*node.inputs, *node.outputs):
            labels.freeze(value, f"{missed!r}, which may run in place of {node.module!r}, did not run on the example")
    labels.make_rectangular()
    return resolve(labels, rules)
