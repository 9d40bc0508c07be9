"""Tables in buffers that masks have to zero, such as positions that are added to a stream of channels.

A channel is only dead if everything that is added to it is zero, too. A table that is multiplied needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.program.arrays import any_over
from engine.program.graph import Node, Value
from engine.removal.propagate import Structure

__all__ = ["beside_tables", "masks_of_tables", "tables_to_mask", "trial_constants"]

Masks = Callable[[frozenset[str]], Mapping[str, Tensor]]
"""Gives the masks of a trial removal, of parameters and of the tables that are masked."""


def trial_constants(structure: Structure, masks: Mapping[str, Tensor]) -> Constants:
    """Return the constants under masks of a trial removal, whatever the weights.

    Args:
        structure: the slots.
        masks: masks by canonical name.
    """
    stored = {
        name: nn.Parameter(torch.empty(value.shape, device="meta"), requires_grad=False)
        for name, value in structure.graph.stored.items()
    }
    return Constants(structure.graph, structure.rules, stored, masks, repaired=True, amounts=structure.amounts)


def masks_of_tables(structure: Structure, masks: Mapping[str, Tensor], keep: Tensor) -> Mapping[str, Tensor]:
    """Return the masks together with those of tables that lose slots; the masks themselves if there are no such tables.

    Args:
        structure: the slots.
        masks: masks by canonical name.
        keep: which slots stay.
    """
    if not structure.masked_tables:
        return masks
    extended = dict(masks)
    for name in structure.masked_tables:
        for layer in structure.of(structure.graph.stored[name]):
            stays = keep[layer] | structure.frozen[layer]
            extended[name] = extended[name] & stays if name in extended else stays
    return extended


def tables_to_mask(structure: Structure, keep: Tensor, masks: Masks) -> frozenset[str]:
    """Return the tables that make a slot vary although all parameters that produce it are masked.

    Args:
        structure: the slots.
        keep: which slots stay in a trial removal.
        masks: the masks of the trial removal.
    """
    weights = {source.name for _, c in structure.contractions() for source in structure.graph.sources(c.weight)}
    chosen: frozenset[str] = frozenset()
    while True:
        constants = trial_constants(structure, masks(chosen))
        more = {name for _, tables, _ in _varying(structure, keep, constants) for name in tables} - weights
        if more <= chosen:
            return chosen
        chosen |= more


def beside_tables(structure: Structure, keep: Tensor, masks: Masks) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (reason, slots, False) for slots that vary even if tables are zero there, as in a quotient.

    Args:
        structure, keep, masks: as for `tables_to_mask`.
    """
    constants = trial_constants(structure, masks(structure.masked_tables))
    for node, tables, removed in _varying(structure, keep, constants):
        if not tables.isdisjoint(structure.masked_tables):
            yield f"{node!r} combines it with a table that cannot be zero there", removed, False


def _varying(structure: Structure, keep: Tensor, constants: Constants) -> Iterator[tuple[Node, frozenset[str], Tensor]]:
    """Yield the nodes that combine constant removed slots with tables, and whose results are not constant."""
    for node, tables, others in _combining(structure):
        numbers = [value for value in others if value.dtype.is_floating_point]  # a condition is never constant
        if not any(len(_unknown(structure, keep, constants, value)) for value in numbers):
            removed = torch.cat([_unknown(structure, keep, constants, value) for value in node.outputs])
            if len(removed):
                yield node, tables, removed


def _combining(structure: Structure) -> Iterator[tuple[Node, frozenset[str], list[Value]]]:
    """Yield the nodes that read tables beside activations, the names of the tables, and the activations."""
    graph = structure.graph
    behind: dict[int, frozenset[str]] = {}  # tables behind what is computed without the inputs
    entering = {value.index for value in graph.inputs}
    for value in graph.values:
        if value.producer is None and value.index not in entering:
            behind[value.index] = graph.maskable & {value.name or ""}
    for node in graph.nodes:
        tables = frozenset[str]().union(*(behind.get(value.index, ()) for value in node.inputs))
        others = [value for value in node.inputs if value.index not in behind]
        if not others:
            behind.update((value.index, tables) for value in node.outputs)
        elif tables:
            yield node, tables, others


def _unknown(structure: Structure, keep: Tensor, constants: Constants, value: Value) -> Tensor:
    """Return the slots of a value that are removed and not constant."""
    unknown = constants[value].isnan()
    slots = [torch.zeros(0, dtype=torch.long)]
    for layer in structure.of(value):
        removed = any_over(unknown & ~keep[layer], [d for d, size in enumerate(layer.shape) if size == 1])
        slots.append(layer[removed])
    return torch.cat(slots)
