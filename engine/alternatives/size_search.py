"""Search for input sizes that reverse a decision in a model's code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.alternatives.axes import Axis
from engine.limits import FURTHEST_SIZE, LARGEST_SIZE, MOST_CHANGES, MOST_TIMES_FURTHER
from engine.program.expressions import Apply, AttributeOf, Expr, Guard, ShapeOf, evaluate, leaves
from engine.program.graph import Value

__all__ = ["changes", "sizes_beyond", "sizes_further", "sizes_of"]


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
        yield from near  # a number without its expression counts as another one in any case
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


def sizes_further(
    guard: Guard,
    numbers: Collection[int | float],
    seen: Collection[tuple[int, ...]],
    attributes: Mapping[tuple[str, str], int],
    at: Mapping[Axis, int],
    axes: Sequence[Axis],
) -> Iterator[dict[Axis, int]]:
    """Yield the next larger and the next smaller size at which the number behind a decision is new.

    This is a loop's number of rounds, an item's number, or how many of several numbers a size exceeds.

    Args:
        guard: the decision.
        numbers: those with which its sizes were compared, at all sizes.
        seen: sizes in earlier runs, in the order of `sizes_of`.
        attributes: numbers in attributes, by module and name.
        at, axes: as above.
    """
    leaves_of_size, expr = list(sizes_of(guard)), guard.expr
    is_count = not guard.decides or expr.symbol == "==" and guard.outcome

    def number(sizes: Sequence[int]) -> Any:
        table = {(leaf.value.index, leaf.dim): size for leaf, size in zip(leaves_of_size, sizes, strict=True)}

        def shape(value: Value) -> tuple[int, ...]:
            return tuple(table.get((value.index, dim), size) for dim, size in enumerate(value.shape))

        def result(expr: Expr) -> Any:
            return evaluate(expr, shape, lambda leaf: attributes[leaf.module, leaf.name])

        left = result(expr.left)
        return left if is_count else [result(Apply(expr.symbol, left, n)) for n in sorted(numbers)]

    present = [leaf.value.shape[leaf.dim] for leaf in leaves_of_size]
    # one line of code may compare other sizes, and more of them, where another layer runs it
    had = [number(sizes) for sizes in (*seen, present) if len(sizes) == len(present)]
    for place, leaf in enumerate(leaves_of_size):
        size = present[place]
        for sizes in (range(size + 1, min(MOST_TIMES_FURTHER * size, LARGEST_SIZE) + 1), range(size - 1, 0, -1)):
            others = (n for n in sizes if number([*present[:place], n, *present[place + 1 :]]) not in had)
            other = next(others, None)
            # a length usually follows from the same dimension, but not behind a transposition
            for axis in sorted(axes, key=lambda axis: all(dim != leaf.dim for _, dim in axis.places)):
                if size and other is not None:
                    yield {**at, axis: round(other * at.get(axis, axis.size) / size)}
