"""Search for input sizes that reverse a decision in a model's code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.alternatives.axes import Axis
from engine.limits import FURTHEST_SIZE, LARGEST_SIZE, MOST_CHANGES
from engine.program.expressions import AttributeOf, Expr, Guard, ShapeOf, evaluate, leaves
from engine.program.graph import Value

__all__ = ["changes", "sizes_beyond", "sizes_of"]


def sizes_of(guard: Guard) -> Iterator[ShapeOf]:
    """Yield the sizes in a comparison, other than those of weights."""
    return (leaf for leaf in leaves(guard.expr) if isinstance(leaf, ShapeOf) and not leaf.value.stored)


def sizes_beyond(guard: Guard, at: Mapping[Axis, int], axes: Sequence[Axis]) -> Iterator[dict[Axis, int]]:
    """Yield sizes that may reverse a decision, each with one axis changed.

    Computed sizes are assumed to grow with the inputs: half of a height changes by one if the height changes by two.

    Args:
        guard: the decision.
        at: sizes in the run that took it, of the axes that were resized there.
        axes: axes that may be resized.
    """
    for leaf in sizes_of(guard):
        change = next(changes(guard, leaf, ()), None)
        size = leaf.value.shape[leaf.dim]
        # a height usually follows from the height
        for axis in sorted(axes, key=lambda axis: all(dim != leaf.dim for _, dim in axis.places)):
            before = at.get(axis, axis.size)
            step = round(change * before / max(size, 1)) if change else 0
            if step and 0 < before + step <= LARGEST_SIZE:
                yield {**at, axis: before + step}


def changes(guard: Guard, leaf: ShapeOf, seen: Collection[int | float]) -> Iterator[int]:
    """Yield the changes of a size that reverse a decision, of this size alone or of all its sizes together.

    Args:
        guard: the decision.
        leaf: one of its sizes.
        seen: values of a count, or of another exact number, in earlier runs.
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
    steps = (change for n in range(1, FURTHEST_SIZE + 1) for change in (n, -n) if size + change > 0)
    others = 0
    for change in dict.fromkeys((*near, *steps)):
        if any(bool(outcome(guard.expr, change, alone)) is not guard.outcome for alone in (True, False)):
            if counts and change not in near and outcome(guard.expr.left, change, False) in seen:
                continue
            yield change
            others += change not in near
            if others == MOST_CHANGES:
                return
