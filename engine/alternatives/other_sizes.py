"""Runs on inputs of other sizes, recorded wherever a model's code reads a size that is not a number of channels.

Code that decides by a size (``if pad > 0``, ``window >= size``), or passes one on in an untracked form (``int(size /
2)``), may take another path for other inputs. So it is run at other sizes until each decision has had both outcomes, or
no more sizes are left to try; runs that differ become part of the program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.alternatives.axes import Axis, larger, odd, smaller
from engine.alternatives.rejections import Rejections
from engine.alternatives.size_search import changes, sizes_beyond, sizes_further, sizes_of
from engine.alternatives.steps import Rounds, calls_by_place, constants_that_differ, numbers_that_differ, steps_of
from engine.limits import LARGEST_SIZE, MOST_ENTRIES
from engine.program.expressions import Guard, describe
from engine.program.graph import Node, Value

__all__ = ["OtherSizes", "reads_sizes"]

Key = tuple[str, str, str]
"""Place, operator and left operand of a comparison: the same for all modules of a class."""

_NUMBERS = 4

# How many sizes are tried because numbers in the code ask for them: of all axes together, one by one, step by step.
_ACROSS, _ONE_BY_ONE, _FURTHER = 6, 24, 12

_MODULES = re.compile(r"[\w.]+\.(?=\w)")
Accepts = Callable[[Mapping[Axis, int]], bool]
"""Runs a model at other sizes; returns whether it accepts them."""


def _key(guard: Guard) -> Key:
    return guard.place, guard.expr.symbol, _MODULES.sub("", describe(guard.expr.left))


def reads_sizes(guards: Iterable[Guard]) -> bool:
    """Whether code decides by the size of something that is computed."""
    return any(True for guard in guards for _ in sizes_of(guard))


class OtherSizes:
    """Runs of one model at sizes other than the example's.

    Attributes:
        varying: numbers among arguments that differed at another size, by the node's index and place.
        resized: indices of captured constants that differed.
        rejections: decisions by which the model rejects inputs.
        with_new_code: sizes at which new code ran.
        took_new_steps: whether the latest run took steps that no earlier run took.

    Args:
        numbers: returns the integer attributes of modules, by module and name.
        reached_new_code: returns whether to keep the last run, whatever it computed.
    """

    def __init__(
        self,
        numbers: Callable[[], Mapping[tuple[str, str], int]] = dict,
        reached_new_code: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reached_new_code, self._numbers = reached_new_code, numbers
        self.rejections, self._rounds = Rejections(numbers), Rounds()
        self._inputs: list[tuple[int, ...]] = []
        self.varying: set[tuple[int, tuple[str, int]]] = set()
        self.resized: set[int] = set()
        self._calls: dict[tuple[Any, ...], Node] = {}
        self._outcomes: dict[Key, set[tuple[int | float, bool]]] = {}
        self._sizes: dict[Key, set[tuple[int, ...]]] = {}
        self._steps: set[tuple[Any, ...]] = set()
        self._guards: dict[Key, Guard] = {}
        self._changed: frozenset[Axis | None] = frozenset([None])  # None for any
        self._axes: dict[Key, set[Axis | None]] = {}
        self._at: dict[Key, Mapping[Axis, int]] = {}  # sizes of the first run that took a decision
        self._run_at: Mapping[Axis, int] = {}
        self._accepted = set[frozenset[Axis | None]]()  # by each run that the model accepts, the axes that it changes
        self._reached: dict[Key, set[frozenset[Axis | None]]] = {}  # the same by decision
        self.with_new_code: list[Mapping[Axis, int]] = []
        self.took_new_steps, self._new = False, False  # the latter: whether the latest run was kept
        self._leading, self._spots = set[Key](), set[str]()
        self._closed: frozenset[Key] = frozenset()  # decisions that another way of running has explored
        self._derived, self._dims = True, set[tuple[int, int]]()
        self._example: dict[Key, frozenset[tuple[int, ...]]] = {}

    def start(self, nodes: Sequence[Node], guards: Sequence[Guard], inputs: Sequence[Value] = ()) -> None:
        """Start from the run on the example.

        Args:
            nodes, guards: of that run.
            inputs: values of the input tensors in order; sizes of all others count as computed.
        """
        self._calls, self._steps = calls_by_place(nodes), steps_of(nodes)
        self._spots = {node.site.spot for node in nodes if node.site is not None}
        self._rounds.start(nodes)
        self._inputs = [value.shape for value in inputs]
        self.rejections.start(self._inputs)
        positions = {value.index: position for position, value in enumerate(inputs)}
        sizes = [leaf for guard in guards for leaf in sizes_of(guard)]
        self._derived = any(leaf.value.index not in positions for leaf in sizes)
        self._dims = {(positions.get(leaf.value.index, -1), leaf.dim) for leaf in sizes}
        self._changed, self._run_at = frozenset(), {}
        self._note(guards)
        self._changed = frozenset([None])
        self._example = {key: frozenset(sizes) for key, sizes in self._sizes.items()}
        self._axes.clear()

    def new_decisions(self, guards: Iterable[Guard]) -> list[Guard]:
        """Return the decisions by sizes of a run that no earlier run has taken.

        Args:
            guards: of the run.
        """
        return [guard for guard in guards if any(True for _ in sizes_of(guard)) and _key(guard) not in self._sizes]

    def is_open(self, guard: Guard) -> bool:
        """Whether a decision by sizes has had the same outcome in all runs."""
        return len({outcome for _, outcome in self._outcomes.get(_key(guard), ())}) < 2

    def places(self) -> frozenset[str]:
        """Return the places, as files and lines, where code decides by sizes that may differ between inputs.

        A decision does not count if its sizes stayed the same whichever axis of the inputs was resized.
        """
        return frozenset(guard.place for key, guard in self._guards.items() if guard.decides and not self._stays(key))

    def _stays(self, key: Key) -> bool:
        """Whether the sizes of a decision stayed the same whichever axis of the inputs was resized."""
        moved = frozenset[Axis | None]().union(*self._accepted)
        first, *others = self._reached[key]
        return len(self._sizes[key]) == 1 and moved <= frozenset[Axis | None]().union(*(first ^ o for o in others))

    def begin_way(
        self, nodes: Sequence[Node], guards: Sequence[Guard], decisions: Sequence[Guard] | None = None
    ) -> bool:
        """Continue with another way to run the model (train mode); return whether it decides by further sizes.

        Args:
            nodes, guards: of its run on the example.
            decisions: the decisions to explore; by default those that no earlier run has taken.
        """
        new = self.new_decisions(guards) if decisions is None else decisions
        self._closed = frozenset(self._sizes) - {_key(guard) for guard in new}
        self._steps |= steps_of(nodes)
        self._rounds.start(nodes)
        for call, node in calls_by_place(nodes).items():
            self._calls.setdefault(call, node)
        self._changed, self._run_at = frozenset(), {}
        self._note(new)
        self._example.update((key, frozenset(self._sizes[key])) for key in map(_key, new))
        self._derived = self._derived or bool(new)
        return bool(new)

    def _note(self, guards: Iterable[Guard]) -> None:
        for guard in guards:
            sizes = tuple(leaf.value.shape[leaf.dim] for leaf in sizes_of(guard))
            if sizes:
                right = guard.expr.right
                key = _key(guard)
                self._sizes.setdefault(key, set()).add(sizes)
                self._reached.setdefault(key, set()).add(self._changed)
                if sizes not in self._example.get(key, ()):
                    self._axes.setdefault(key, set()).update(self._changed)
                number = right if isinstance(right, (int, float)) else 0
                number = number if guard.decides else len(self._sizes[key])
                self._outcomes.setdefault(key, set()).add((number, guard.outcome))
                self._guards.setdefault(key, guard)
                self._at.setdefault(key, self._run_at)

    def undecided(self, axes: Collection[Axis] | None = None) -> list[Guard]:
        """Return decisions whose sizes differed between runs, but whose outcome did not.

        A number that is not tracked has to be seen at several sizes.

        Args:
            axes: axes that may still be resized, None for all; decisions that depend on none of them are left out.
        """
        movers = None if axes is None else {None, *axes}
        return [
            self._guards[key]
            for key, seen in self._outcomes.items()
            if key not in self._closed
            and len(self._sizes[key]) > 1
            and len(seen) < (2 if len({yes for _, yes in seen}) > 1 else _NUMBERS)
            and (movers is None or not movers.isdisjoint(self._axes.get(key, ())))
        ]

    def explore(self, axes: Sequence[Axis], accepts: Accepts, larger_pictures: bool) -> None:
        """Try other sizes until each decision has had both outcomes.

        Args:
            axes: axes that may be resized.
            accepts: records a run at other sizes; returns whether the model accepts them.
            larger_pictures: whether larger pictures were recorded already.
        """

        def tried(sizes: Mapping[Axis, int]) -> bool:
            self._run_at = {axis: size for axis, size in sizes.items() if size != axis.size}
            self._changed = frozenset(self._run_at)
            shapes = self._shapes(sizes)
            if any(math.prod(shape) > MOST_ENTRIES for shape in shapes) or self.rejections.repeats(shapes):
                return False
            self._new = False
            accepted = accepts(sizes)
            if accepted and self._new:
                self.with_new_code.append(dict(sizes))
            return accepted

        axes = [axis for axis in axes if self._matters(axis)]
        sides = [axis for axis in axes if axis.is_image_side]
        groups = [[axis] for axis in axes if not axis.is_image_side and axis.size]
        taken = [sides] if sides and larger_pictures else list(self._taken(sides, tried))
        taken += [group for axes in groups for group in self._taken(axes, tried)]
        rest = [axis for group in taken for axis in group if not axis.batch]
        tries: list[dict[Axis, int]] = [
            {axis: smaller(axis.size) for axis in rest},
            {axis: odd(axis.size, k) for k, axis in enumerate(rest)},
            *({axis: other(axis.size)} for axis in rest if len(rest) > 1 for other in (larger, smaller)),
        ]
        self._try(tries, rest, tried)
        self._try_across(rest, tried)
        for batch in (axis for group in taken for axis in group if axis.batch):
            self._try([{batch: odd(batch.size)}, {batch: larger(batch.size)}], [batch], tried)
            self._try_across([batch], tried)
        self._try_one_by_one([axis for group in taken for axis in group], tried)
        self._try_further([axis for group in taken for axis in group], tried)

    def _try(self, tries: Iterable[Mapping[Axis, int]], axes: Sequence[Axis], accepts: Accepts) -> None:
        """Run the model at other sizes, as long as there are decisions that these axes may affect."""
        for sizes in tries:
            if not self.undecided(axes):
                return
            if sizes:
                accepts(sizes)

    def _try_across(self, axes: Sequence[Axis], accepts: Accepts) -> None:
        """Run the model at a few sizes around the numbers with which undecided sizes are compared.

        A size is tried for certain decisions, and skipped once these have had both outcomes, except after a run that
        reached new code: numbers computed from sizes there have to be seen twice.
        """
        latest = False
        for sizes, decisions in self._across(axes)[:_ACROSS]:
            undecided = set(map(id, self.undecided(axes)))
            if latest or any(id(guard) in undecided for guard in decisions):
                self._new = False
                accepts(sizes)
                latest = self._new

    def _across(self, axes: Sequence[Axis]) -> list[tuple[dict[Axis, int], list[Guard]]]:
        """Return sizes around the numbers with which undecided sizes are compared, each with its decisions.

        If a layer in between reduces a size by n, the input is assumed to shrink by n as well. A size is not tried for
        a decision whose outcome it would not change.
        """
        tries: dict[tuple[tuple[Axis, int], ...], list[Guard]] = {}
        for guard in self.undecided(axes):
            seen = {number for number, _ in self._outcomes[_key(guard)]}
            for leaf in sizes_of(guard) if axes else ():
                for change in changes(guard, leaf, seen):
                    sizes = tuple((axis, axis.size + change) for axis in axes)
                    if all(0 < size <= LARGEST_SIZE for _, size in sizes):
                        tries.setdefault(sizes, []).append(guard)
        return [(dict(sizes), decisions) for sizes, decisions in tries.items()]

    def _try_one_by_one(self, axes: Sequence[Axis], accepts: Accepts) -> None:
        """Run the model at sizes that reverse decisions that have had the same outcome in all runs.

        Each starts from the run that took the decision first, so that one leads to the next: ``h == 12 and w == 6``
        only compares the width if the height is 12.
        """
        searched, runs = set[Key](), 0
        while waiting := [key for key, guard in self._guards.items() if key not in searched and self.is_open(guard)]:
            for key in waiting:
                searched.add(key)
                guard = self._guards[key]
                if not guard.decides or key in self._closed or self._stays(key):
                    continue
                for sizes in sizes_beyond(guard, self._at[key], axes):
                    if runs == _ONE_BY_ONE or not self.is_open(guard):
                        break
                    runs += 1
                    accepts(sizes)

    def _try_further(self, axes: Sequence[Axis], accepts: Accepts) -> None:
        """Run the model at sizes that give other numbers of rounds, or items, as long as each leads to new steps."""
        numbers, tried = self._numbers(), list[Mapping[Axis, int]]()
        for key, guard in list(self._guards.items()):
            several = guard.decides and guard.expr.symbol != "==" and len({n for n, _ in self._outcomes[key]}) > 1
            if key in self._closed or len(self._sizes[key]) < 2 or not (several or key in self._leading):
                continue
            own, leads_on = list(axes), True
            while leads_on:
                leads_on, compared = False, {number for number, _ in self._outcomes[key]}
                for sizes in sizes_further(guard, compared, set(self._sizes[key]), numbers, self._at[key], tuple(own)):
                    if sizes not in tried and len(tried) < _FURTHER:
                        before = len(self._sizes[key])
                        tried.append(sizes)
                        leads_on |= accepts(sizes) and self.took_new_steps
                        if len(self._sizes[key]) == before:  # the size does not follow from what changed
                            own = [axis for axis in own if sizes.get(axis) in (None, self._at[key].get(axis))]

    def _shapes(self, sizes: Mapping[Axis, int]) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs at other sizes."""
        others = {place: size for axis, size in sizes.items() for place in axis.places}
        shapes = enumerate(self._inputs)
        return [tuple(others.get((position, dim), n) for dim, n in enumerate(shape)) for position, shape in shapes]

    def _matters(self, axis: Axis) -> bool:
        """Whether code may decide by an axis: through a size of the inputs themselves, or of computed values."""
        return self._derived or not self._dims.isdisjoint(axis.places)

    def _taken(self, group: Sequence[Axis], accepts: Accepts) -> Iterator[Sequence[Axis]]:
        """Yield the axes that can be resized: all of a group together, or else each that can be resized alone."""
        if not group or self._first(group, accepts):
            yield from [group] if group else []
        elif len(group) > 1:
            yield from ([axis] for axis in group if self._first([axis], accepts))

    def _first(self, group: Sequence[Axis], accepts: Accepts) -> bool:
        """Whether the model accepts any other size; sizes are tried until it accepts one."""
        tries = [
            {axis: larger(axis.size) for axis in group},
            {axis: odd(axis.size, k) for k, axis in enumerate(group)},
            {axis: smaller(axis.size) for axis in group},
        ]
        if group[0].batch:
            tries.insert(0, {axis: 1 if axis.size > 1 else 3 for axis in group})
        return any(accepts(sizes) for sizes in tries if any(size != axis.size for axis, size in sizes.items()))

    def repeat(self, one: Sequence[Node], other: Sequence[Node]) -> None:
        """Compare a run that calls the same ops on the same values, possibly from other places in the code.

        Args:
            one: the run on the example.
            other: the run that is not kept.
        """
        self.took_new_steps = False
        for pair in zip(one, other, strict=True):
            self._compare(*pair, both=False)

    def add(self, nodes: Sequence[Node], guards: Sequence[Guard], kept: bool = False) -> bool:
        """Compare a run with the earlier ones; return whether to keep it, because it reached new code.

        Args:
            nodes, guards: of that run.
            kept: whether to keep it in any case.
        """
        self._note(guards)
        self._accepted.add(self._changed)
        self._rounds.compare(nodes)
        steps = steps_of(nodes)
        self.took_new_steps = not steps <= self._steps
        spots = {node.site.spot for node in nodes if node.site is not None}
        if self.took_new_steps and spots <= self._spots:  # the same lines, on what other layers compute
            self._leading.update(map(_key, guards))
        self._spots |= spots
        new = kept or self.took_new_steps or self._reached_new_code()
        for call, node in calls_by_place(nodes).items():
            earlier_node = self._calls.get(call)
            if earlier_node is not None:
                self._compare(earlier_node, node, both=new)
            elif new:
                self._calls[call] = node
        self._steps |= steps
        self._new = new
        return new

    def carried(self, nodes: Sequence[Node]) -> set[int]:
        """Return the indices of values carried by loops whose number of rounds differed between runs.

        Args:
            nodes: of the program.
        """
        return self._rounds.carried(nodes)

    def reject(self, guards: Iterable[Guard]) -> None:
        """Note the decisions of a run that ended with an error: they lead to no output.

        Args:
            guards: up to the error.
        """
        self._note(guards)

    def _compare(self, one: Node, other: Node, both: bool) -> None:
        """Mark the numbers, and the captured constants, that differ between two calls from one place.

        Args:
            one: a call that is part of the program.
            other: one from the same place.
            both: whether the other is part of it as well.
        """
        for number in numbers_that_differ(one, other):
            self.varying |= {(node.index, number) for node in ((one, other) if both else (one,))}
        for mine, same in constants_that_differ(one, other):
            self.resized |= {mine.index, same.index} if both else {mine.index}
