"""The steps of a run: which call follows which, and which call computes what another one reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from engine.program.graph import Node

__all__ = ["Rounds", "calls_by_place", "steps_of"]


def calls_by_place(nodes: Sequence[Node]) -> dict[tuple[Any, ...], Node]:
    """Return calls by their place in the code, and by how often the module has run it before."""
    counts: dict[tuple[Any, ...], int] = {}
    table: dict[tuple[Any, ...], Node] = {}
    for node in nodes:
        place = _place(node)
        counts[place] = counts.get(place, -1) + 1
        table[(place, counts[place])] = node
    return table


def steps_of(nodes: Sequence[Node]) -> set[tuple[Any, ...]]:
    """Return the pairs of successive calls in each module, and of calls that compute and read a value.

    A loop that runs longer adds no steps. A run that skips a call does, because it reads an earlier value, and so does
    a run that passes another dimension, flag or string at the same place.
    """
    last: dict[str, tuple[Any, ...]] = {}
    makers: dict[int, tuple[Any, ...]] = {}
    steps: set[tuple[Any, ...]] = set()
    for node in nodes:
        step = (node.op, None if node.site is None else node.site.spot, _manner(node))
        steps.add((node.module, last.get(node.module), step))
        steps.add((node.module, frozenset(makers.get(v.index) for v in node.inputs if not v.stored), step))
        last[node.module] = step
        makers.update((v.index, (node.module, *step)) for v in node.outputs)
    return steps


def _manner(node: Node) -> tuple[Any, ...]:
    """Return the arguments that determine what an op does: dimensions, flags, strings and dtypes, no other numbers."""
    return tuple(
        (name, repr(value) if "dim" in name else value)
        for name, value in node.args.items()
        if "dim" in name or isinstance(value, (bool, str, torch.dtype))
    )


class Rounds:
    """Number of calls at each place in the code, and the places where this differed between runs.

    A sum over the rounds of a loop changes if it runs longer, although each round is the same.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._others: set[tuple[Any, ...]] = set()

    def start(self, nodes: Sequence[Node]) -> None:
        """Count the calls of a run on the example.

        Args:
            nodes: of the run.
        """
        counts = Counter(map(_place, nodes))
        self._counts.update({place: count for place, count in counts.items() if place not in self._counts})

    def compare(self, nodes: Sequence[Node]) -> None:
        """Note the places where a run makes another number of calls.

        Args:
            nodes: of the run.
        """
        counts = Counter(map(_place, nodes))
        self._others.update(place for place, count in counts.items() if self._counts[place] not in (0, count))

    def carried(self, nodes: Sequence[Node]) -> set[int]:
        """Return the indices of values at such places that are computed from other values of the same place.

        Args:
            nodes: of the program.
        """
        behind: dict[int, frozenset[tuple[Any, ...]]] = {}
        result: set[int] = set()
        for node in nodes if self._others else ():
            before = frozenset[tuple[Any, ...]]().union(*(behind.get(v.index, ()) for v in node.inputs))
            place = _place(node)
            if place in before:
                result.update(value.index for value in node.outputs)
            if here := before | {place} if place in self._others else before:
                behind.update((value.index, here) for value in node.outputs)
        return result


def _place(node: Node) -> tuple[Any, ...]:
    return node.module, node.op, None if node.site is None else node.site.spot
