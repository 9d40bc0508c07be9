"""Do the sizes written in Python code follow when slots are removed? What does not follow stays whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.clusters import clusters
from engine.errors import RuleError
from engine.graph import Graph, Node
from engine.propagate import Structure, propagate
from engine.rule import Demand, Registry
from engine.shrink import Shrunk
from engine.sizes import AttributeOf, Expr, ShapeOf, describe, evaluate, leaves

__all__ = ["structure_of", "touching", "unmet_demands"]


def unmet_demands(shrunk: Shrunk) -> Iterator[tuple[Node, str]]:
    """Yield the nodes whose integer arguments would be wrong, with the reason.

    An argument that the code derives from a shape or an attribute is evaluated under the new shapes; any other is as
    the code has it.
    """
    structure = shrunk.structure
    attributes: Mapping[str, Mapping[str, int]] | None = None

    def attribute(expr: AttributeOf) -> int:
        nonlocal attributes
        attributes = shrunk.attributes() if attributes is None else attributes
        recorded = structure.graph.attributes[expr.module][expr.name]
        return attributes.get(expr.module, {}).get(expr.name, recorded)

    for node in structure.graph.nodes:
        for demand in _demands(node, shrunk):
            expr: Expr = node.sizes.get(demand.argument, demand.given)
            found = evaluate(expr, shrunk.shape, attribute)
            if found != demand.wanted:
                yield node, _reason(node, demand, expr)
                break


def _demands(node: Node, shrunk: Shrunk) -> Iterator[Demand]:
    """What the rule asks for, and that a factor computed from sizes (``head_dim ** -0.5``) stays what it is."""
    yield from shrunk.structure.rules.rule(node.op).demands(node, shrunk.indices, shrunk.shape)
    for (name, position), _ in node.sizes.items():
        number = node.args[name]
        if isinstance(number, float):
            yield Demand((name, position), number, number)


def _reason(node: Node, demand: Demand, expr: Expr) -> str:
    written = describe(expr)
    value = f"{written} = {demand.given}" if written != str(demand.given) else written
    return f"{node!r} is given the size {value}, which does not follow when channels go"


def touching(structure: Structure, node: Node) -> Tensor:
    """Return the slots that a node's tensors carry, and those that its numbers depend on."""
    values = [*node.inputs, *node.outputs]
    for expr in node.sizes.values():
        for leaf in leaves(expr):
            if isinstance(leaf, ShapeOf):
                values.append(leaf.value)
            else:
                owned = (n for n in structure.graph.nodes if n.module == leaf.module)
                values += [v for n in owned for v in (*n.inputs, *n.outputs)]
    layers = [layer.reshape(-1) for v in values for layer in structure.of(v)]
    return torch.cat(layers).unique() if layers else torch.zeros(0, dtype=torch.long)


def _freeze_unsafe(structure: Structure) -> None:
    """Remove a part of every group, on trial; freeze the groups at which an argument does not follow."""
    for part in (_first_half, functools.partial(_first_half, largest=1)):
        while True:
            group = clusters(structure)
            keep = ~part(structure, group)
            unmet = list(unmet_demands(Shrunk(structure, keep)))
            if not unmet:
                break
            for node, reason in unmet:
                slots = touching(structure, node)
                gone = slots[~keep[slots]]
                if not len(gone):
                    raise RuleError(
                        f"The rule of {node!r} asks for a size that differs from the recorded one. {reason}"
                    )
                members = torch.isin(group, group[gone].unique()).nonzero()[:, 0]
                structure.slots.freeze(members, reason)
                structure.frozen[members] = True
                structure.unsafe[members] = True


def _first_half(structure: Structure, group: Tensor, largest: int | None = None) -> Tensor:
    """Return a bool per slot: the first half of each group, or at most ``largest`` of it."""
    free = structure.free().nonzero()[:, 0]
    order = free[group[free].argsort(stable=True)]
    ids, counts = group[order].unique_consecutive(return_counts=True)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    limit = counts // 2 if largest is None else counts.clamp(max=2) - 1
    removed = torch.zeros(len(structure.roots), dtype=torch.bool)
    removed[order[place < limit.repeat_interleave(counts)]] = True
    return removed


def structure_of(graph: Graph, rules: Registry) -> Structure:
    """Return the structure of a graph with all axes frozen at which sizes in Python code do not follow."""
    structure = propagate(graph, rules)
    _freeze_unsafe(structure)
    return structure
