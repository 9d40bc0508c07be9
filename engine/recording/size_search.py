"""Sizes of the inputs at which a decision in a model's code would come out otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.program.expressions import AttributeOf, Expr, Guard, ShapeOf, evaluate, leaves
from engine.program.graph import Value
from engine.recording.axes import Axis

__all__ = ["LARGEST", "MOST_ENTRIES", "changes", "sizes_beyond", "sizes_of"]

LARGEST = 8192
"""No larger size is tried because a number in the code asks for it."""

MOST_ENTRIES = 2**24
"""Of one input, at the sizes that are tried."""

_FURTHEST, _MOST_CHANGES = 32, 2
"""How far from its size a decision is looked for to come out otherwise, and how many such sizes are tried."""


def sizes_of(guard: Guard) -> Iterator[ShapeOf]:
    """Yield the sizes, other than those of weights, by which code decides."""
    return (leaf for leaf in leaves(guard.expr) if isinstance(leaf, ShapeOf) and not leaf.value.stored)


def sizes_beyond(guard: Guard, at: Mapping[Axis, int], axes: Sequence[Axis]) -> Iterator[dict[Axis, int]]:
    """Yield sizes at which a decision may come out otherwise than it did, each with one axis moved.

    What is computed is taken to grow with the inputs: half of a height moves by one where the height moves by two.

    Args:
        guard: the decision.
        at: sizes of the run that took it, of those axes that had another size than in the example.
        axes: those that may be moved.
    """
    for leaf in sizes_of(guard):
        change = next(changes(guard, leaf, ()), None)
        size = leaf.value.shape[leaf.dim]
        # a height usually follows from the height
        for axis in sorted(axes, key=lambda axis: all(dim != leaf.dim for _, dim in axis.places)):
            before = at.get(axis, axis.size)
            step = round(change * before / max(size, 1)) if change else 0
            if step and 0 < before + step <= LARGEST:
                yield {**at, axis: before + step}


def changes(guard: Guard, leaf: ShapeOf, seen: Collection[int | float]) -> Iterator[int]:
    """Yield by how much a size has to change for a decision to come out otherwise, alone or as all of its sizes do.

    Args:
        guard: the decision.
        leaf: one of its sizes.
        seen: numbers that a count, or another exact number, has been in some run.
    """
    size, bound = leaf.value.shape[leaf.dim], guard.expr.right
    near = [bound - size + step for step in (-1, 0, 1)] if isinstance(bound, int) else []
    if not guard.decides or any(isinstance(other, AttributeOf) for other in leaves(guard.expr)):
        yield from near  # a number that forgets where it is from is another in any case
        return

    def outcome(expr: Expr, change: int, alone: bool) -> Any:
        def shape(value: Value) -> tuple[int, ...]:
            moved = [not alone or (value is leaf.value and dim == leaf.dim) for dim in range(value.ndim)]
            return tuple(n + change if moves else n for n, moves in zip(value.shape, moved, strict=True))

        return evaluate(expr, shape, lambda attribute: 0)

    counts = guard.expr.symbol == "==" and guard.outcome and isinstance(bound, (int, float))
    steps = (change for n in range(1, _FURTHEST + 1) for change in (n, -n) if size + change > 0)
    others = 0
    for change in dict.fromkeys((*near, *steps)):
        if any(bool(outcome(guard.expr, change, alone)) is not guard.outcome for alone in (True, False)):
            if counts and change not in near and outcome(guard.expr.left, change, False) in seen:
                continue
            yield change
            others += change not in near
            if others == _MOST_CHANGES:
                return
