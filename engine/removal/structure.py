"""The structure of a model: its slots, with groups frozen whose trial removal breaks the code or a rule."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constraints import Equal, closed
from engine.errors import RuleError
from engine.ops import rules_of
from engine.program.arrays import support
from engine.program.garbage import uncollected
from engine.program.graph import Graph, Node
from engine.removal.clusters import clusters
from engine.removal.demands import asked_numbers, one_number, settle
from engine.removal.propagate import Structure, propagate
from engine.removal.shrink import Shrunk
from engine.removal.tables import beside_tables, tables_to_mask, trial_constants
from engine.rule import Registry, Statistic
from engine.tracer import trace

__all__ = ["readers_of_zeros", "structure_for", "structure_of"]


def structure_for(
    model: nn.Module, example_inputs: Any, graph: Graph | None, rules: Registry | None = None
) -> Structure:
    """Return the structure of a model, from its graph if there is one.

    Raises:
        TraceError: if the model rejects the example inputs, or the graph is stale.
    """
    graph = trace(model, example_inputs) if graph is None else graph
    graph.check_fresh(model)
    return structure_of(graph, rules)


@uncollected()
def structure_of(graph: Graph, rules: Registry | None = None) -> Structure:
    """Return the structure of a graph, with slots frozen where sizes in Python code do not follow.

    It is computed once per graph and registry, and read-only from then on.
    """
    rules = rules_of(graph) if rules is None else rules
    return graph.derived((structure_of, rules), functools.partial(_structure, graph, rules))


def _structure(graph: Graph, rules: Registry) -> Structure:
    structure = propagate(graph, rules)
    asked = asked_numbers(structure)
    if asked or graph.guards:
        equal = tuple(Equal(rows) for rows in one_number(structure, asked))
        if equal:  # a copy computes cached properties again
            structure = replace(structure, constraints=structure.constraints + equal)
        _freeze(structure, _without_sizes)
    if graph.maskable & graph.stored.keys():
        keep = _trial_keep(structure)
        masks = functools.partial(_masks, structure, keep)
        structure = replace(structure, masked_tables=tables_to_mask(structure, keep, masks))
        _freeze(structure, _not_beside_tables)
    if any(True for _ in readers_of_zeros(structure)):
        _freeze(structure, _not_zero)
    return structure


def readers_of_zeros(structure: Structure) -> Iterator[tuple[Node, Statistic, Tensor]]:
    """Yield the nodes that can lose zero channels only, with what they read and its slots."""
    for node in structure.graph.nodes:
        rule = structure.rules.of(node)
        spans = (
            () if structure.graph.unread(node) else [*rule.rare.centre(node, structure.graph)] or rule.only_zeros(node)
        )
        for span in spans:
            slots = structure.along(span.input, span.dim)
            if slots is not None:
                yield node, span, slots


Found = Iterator[tuple[str, Tensor, bool]]
"""(reason why a removal goes wrong, slots concerned, whether a size in the code is the cause)"""


def _freeze(structure: Structure, wrong: Any) -> None:
    """Remove a part of every group on trial; freeze the groups for which that goes wrong."""
    group = clusters(structure)
    for part in (_first_half, functools.partial(_first_half, largest=1)):
        while True:
            keep = _trial_keep(structure, group, part)
            failures = list(wrong(structure, keep))
            if not failures:
                break
            for reason, removed, unsafe in failures:
                members = torch.isin(group, group[removed].unique()).nonzero()[:, 0]
                structure.slots.freeze(members, reason)
                structure.frozen[members] = True
                structure.unsafe[members] |= unsafe
            group = clusters(structure)


def _trial_keep(structure: Structure, group: Tensor | None = None, part: Any = None) -> Tensor:
    """Return which slots stay in a trial removal of a part of every group."""
    group = clusters(structure) if group is None else group
    removed = (part or _first_half)(structure, group)
    return closed(structure.constraints, ~removed, functools.partial(torch.zeros, len(group)))


def _without_sizes(structure: Structure, keep: Tensor) -> Found:
    """Find arguments in the code that would not follow."""
    for node, reason, slots in settle(Shrunk(structure, keep)).unmet:
        removed = slots[~keep[slots]]
        if not len(removed):
            raise RuleError(f"The rule of {node!r} demands a size that differs from the recorded one. {reason}")
        yield reason, removed, True


def _not_beside_tables(structure: Structure, keep: Tensor) -> Found:
    """Find ops that combine channels with a table that would not be zero there."""
    if structure.masked_tables:
        yield from beside_tables(structure, keep, functools.partial(_masks, structure, keep))


def _not_zero(structure: Structure, keep: Tensor) -> Found:
    """Find ops that allow zeros only and would read other constants even under repaired masks."""
    constants = trial_constants(structure, _masks(structure, keep, structure.masked_tables))
    for node, span, slots in readers_of_zeros(structure):
        removed = slots[~keep[slots] & (constants.along(span.input, span.dim) != 0)]
        if len(removed):
            yield f"{node!r} runs over it, and it is not zero there", removed, False


def _masks(structure: Structure, keep: Tensor, tables: Collection[str]) -> dict[str, Tensor]:
    """Return compact masks of everything that produces the removed slots, also of tables; consumers need none."""
    reading = {c.weight.index: c.input_place for _, c in structure.contractions() if not c.depthwise}
    for node in structure.graph.nodes:
        if any(True for _ in structure.rules.of(node).rare.produces(node)):
            for table in node.inputs:
                reading.pop(table.index, None)  # it may be the weight of the last layer too
    masks: dict[str, Tensor] = {}
    for name, value in structure.graph.stored.items():
        for layer in structure.of(value):
            stays = keep[layer]
            if name in structure.graph.maskable and name not in tables:
                continue
            reads = support(layer) == (reading.get(value.index),) and value.index not in structure.tables
            if not reads and (value.index, *support(layer)) not in structure.unmasked and not stays.all():
                masks[name] = stays & masks[name] if name in masks else stays
    return masks


def _first_half(structure: Structure, group: Tensor, largest: int | None = None) -> Tensor:
    """Return a bool per slot: the first half of each group, or at most ``largest`` slots of it."""
    free = structure.free().nonzero()[:, 0]
    order = free[group[free].argsort(stable=True)]
    ids, counts = group[order].unique_consecutive(return_counts=True)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    limit = counts // 2 if largest is None else counts.clamp(max=2) - 1
    removed = torch.zeros(len(structure.roots), dtype=torch.bool)
    removed[order[place < limit.repeat_interleave(counts)]] = True
    return removed
