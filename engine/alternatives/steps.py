"""The steps of a run: which call follows which, and which call computes what another one reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.numbers.sizes import numbers_in
from engine.program.arrays import same_entries
from engine.program.graph import Node, Value

__all__ = [
    "Rounds",
    "calls_by_place",
    "constants_that_differ",
    "layers_behind",
    "numbers_that_differ",
    "steps_of",
]


def calls_by_place(nodes: Sequence[Node]) -> dict[tuple[Any, ...], Node]:
    """Return calls by their place in the code, and by how often the module has run it before."""
    counts: dict[tuple[Any, ...], int] = {}
    table: dict[tuple[Any, ...], Node] = {}
    for node in nodes:
        place = _place(node)
        counts[place] = counts.get(place, -1) + 1
        table[(place, counts[place])] = node
    return table


def layers_behind(nodes: Sequence[Node]) -> dict[int, frozenset[str]]:
    """Return, for each value by its index, the parameters of the layers that compute it: the last ones on each path.

    They distinguish values of one line in a loop over different layers, but not in a loop that repeats one layer.

    Args:
        nodes: of a run.
    """
    behind: dict[int, frozenset[str]] = {}
    for node in nodes:
        names = frozenset(value.name for value in node.inputs if value.name is not None)
        if not names:
            before = dict.fromkeys(behind.get(value.index, names) for value in node.inputs)
            names = next(iter(before)) if len(before) == 1 else names.union(*before)
        behind.update((value.index, names) for value in node.outputs)
    return behind


def steps_of(nodes: Sequence[Node]) -> set[tuple[Any, ...]]:
    """Return the pairs of successive calls in each module, and of calls that compute and read a value.

    A loop that runs longer adds no steps. A run that skips a call does, because it reads an earlier value, and so does
    a run that passes another dimension, flag or string at the same place, or what another layer has computed.
    """
    behind = layers_behind(nodes)
    last: dict[str, tuple[Any, ...]] = {}
    makers: dict[int, tuple[Any, ...]] = {}
    steps: set[tuple[Any, ...]] = set()
    for node in nodes:
        step = (node.op, None if node.site is None else node.site.spot, _manner(node))
        steps.add((node.module, last.get(node.module), step))
        steps.add((node.module, frozenset(makers.get(v.index) for v in node.inputs if not v.stored), step))
        last[node.module] = step
        makers.update((v.index, (node.module, *step, behind[v.index])) for v in node.outputs)
    return steps


def _manner(node: Node) -> tuple[Any, ...]:
    """Return the arguments that determine what an op does: dimensions, flags, strings and dtypes, no other numbers."""
    return tuple(
        (name, repr(value) if "dim" in name else value)
        for name, value in node.args.items()
        if "dim" in name or isinstance(value, (bool, str, torch.dtype))
    )


def numbers_that_differ(one: Node, other: Node) -> Iterator[tuple[str, int]]:
    """Yield the numbers that differ between the arguments of two calls, by argument and position, except dimensions.

    Args:
        one, other: calls from one place.
    """
    for name, value in one.args.items():
        theirs = other.args.get(name)
        if not (isinstance(value, Value) or isinstance(theirs, Value) or "dim" in name):
            pairs = zip(numbers_in(value), numbers_in(theirs), strict=False)
            yield from ((name, position) for position, (number, its) in enumerate(pairs) if number != its)


def constants_that_differ(one: Node, other: Node) -> Iterator[tuple[Value, Value]]:
    """Yield the captured constants of a call that differ from another one's, each with the other.

    Args:
        one, other: calls from one place.
    """
    pairs = zip(one.inputs, other.inputs, strict=False)
    return ((mine, theirs) for mine, theirs in pairs if mine.data is not None and not _same_data(mine, theirs))


def _same_data(one: Value, other: Value) -> bool:
    if one.data is None or other.data is None or one.shape != other.shape:
        return False
    return one.data is other.data or one.data.is_meta or same_entries(one.data, other.data)


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
