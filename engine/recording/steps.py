"""The steps that a run takes: which call follows which, and which makes what another one reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.program.graph import Node

__all__ = ["calls_by_place", "steps_of"]


def calls_by_place(nodes: Sequence[Node]) -> dict[tuple[Any, ...], Node]:
    """Return calls by the place in the code, and by how often that has run in the module before."""
    counts: dict[tuple[Any, ...], int] = {}
    table: dict[tuple[Any, ...], Node] = {}
    for node in nodes:
        place = (node.module, node.op, None if node.site is None else (node.site.code, node.site.line))
        counts[place] = counts.get(place, -1) + 1
        table[(place, counts[place])] = node
    return table


def steps_of(nodes: Sequence[Node]) -> set[tuple[Any, ...]]:
    """Return which call follows which in each module, and which calls make what it reads.

    A loop that runs longer takes no other steps. A run that leaves a call out reads what came before it, and one that
    passes another dimension, flag or text does something else at the same place.
    """
    last: dict[str, tuple[Any, ...]] = {}
    makers: dict[int, tuple[Any, ...]] = {}
    steps: set[tuple[Any, ...]] = set()
    for node in nodes:
        step = (node.op, None if node.site is None else (node.site.code, node.site.line), _manner(node))
        steps.add((node.module, last.get(node.module), step))
        steps.add((node.module, frozenset(makers.get(v.index) for v in node.inputs if not v.stored), step))
        last[node.module] = step
        makers.update((v.index, (node.module, *step)) for v in node.outputs)
    return steps


def _manner(node: Node) -> tuple[Any, ...]:
    """Return the arguments that say how an op computes: dimensions, flags, texts and types, without other numbers."""
    return tuple(
        (name, repr(value) if "dim" in name else value)
        for name, value in node.args.items()
        if "dim" in name or isinstance(value, (bool, str, torch.dtype))
    )
