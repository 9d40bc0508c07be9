"""Numbers among an op's arguments that depend on a size of the input other than a number of channels.

What a rule claims about an op has to hold for all values of such a number. The rule is therefore evaluated again with
other values, and entries that change are not constant: a border that is not padded at the example's size, a slice that
cuts nothing off, a factor of one over the number of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.program.arrays import uniform
from engine.program.expressions import Expr, ShapeOf, leaves
from engine.program.graph import Graph, Node, Value

__all__ = ["Amounts", "Place", "agreed", "amounts_of", "follows_size", "none_known", "other_amounts"]

Place = tuple[str, int]
"""Name of an argument, and position of the number in it."""

IsChannel = Callable[[Value, int], bool]
"""Whether the size of a value along a dimension is a number of channels, which does not depend on the input."""


def follows_size(expr: Expr, is_channel: IsChannel) -> bool:
    """Whether a number changes with the size of the input.

    Example:
        >>> from engine.program.expressions import Apply
        >>> x = Value(0, (2, 8, 6, 6), torch.float32)
        >>> channels = lambda value, dim: dim == 1
        >>> [follows_size(Apply("%", ShapeOf(x, dim), 4), channels) for dim in (1, 2)]
        [False, True]
    """
    return any(isinstance(leaf, ShapeOf) and _is_size(leaf, is_channel) for leaf in leaves(expr))


def _is_size(leaf: ShapeOf, is_channel: IsChannel) -> bool:
    fixed = leaf.value.stored or leaf.value.data is not None
    return not fixed and not is_channel(leaf.value, leaf.dim)


def amounts_of(node: Node, is_channel: IsChannel) -> frozenset[Place]:
    """Return the positions of a node's numeric arguments that change with the size of the input."""
    return frozenset(place for place, expr in node.sizes.items() if follows_size(expr, is_channel))


@dataclass(frozen=True, eq=False)
class Amounts:
    """Numbers among the arguments of a program's ops that change with the size of the input.

    Attributes:
        varying: node index -> positions of such numbers.
        is_channel: whether the size of a value along a dimension is a number of channels.
    """

    varying: Mapping[int, frozenset[Place]]
    is_channel: IsChannel

    @classmethod
    def of(cls, graph: Graph, is_channel: IsChannel) -> Amounts:
        """Return those of a program, including numbers that changed when it ran at other sizes.

        Args:
            graph: the recorded program.
            is_channel: identifies sizes that do not depend on the input.
        """
        table: dict[int, set[Place]] = {}
        for node in graph.nodes:
            table.setdefault(node.index, set()).update(amounts_of(node, is_channel))
        for index, place in graph.varying:
            table.setdefault(index, set()).add(place)
        return cls({index: frozenset(places) for index, places in table.items() if places}, is_channel)

    def at(self, node: Node) -> frozenset[Place]:
        """Return the positions of such numbers among the arguments of a node."""
        return self.varying.get(node.index, frozenset())


def other_amounts(node: Node, places: Iterable[Place]) -> Iterator[Node]:
    """Yield the node with larger and with smaller numbers at some positions.

    Example:
        >>> node = Node(0, "pad", None, {"pad": [0, 0, 4, 1]}, {}, (), (), "")
        >>> [other.args["pad"] for other in other_amounts(node, [("pad", 0), ("pad", 2)])]
        [[1, 0, 5, 1], [0, 0, 2, 1]]
    """
    by_name: dict[str, set[int]] = {}
    for name, position in places:
        by_name.setdefault(name, set()).add(position)
    for other in (_larger, _smaller):
        changed = {name: _changed(node.args[name], at, other, [0]) for name, at in by_name.items()}
        yield replace(node, args={**node.args, **changed})


def _larger(number: float) -> float:
    if isinstance(number, float):
        return number * 1.25 + 0.375
    return number + 1 if number >= 0 else number - 1


def _smaller(number: float) -> float:
    return number * 0.75 if isinstance(number, float) else int(number / 2)


def _changed(tree: Any, at: set[int], other: Callable[[float], float], count: list[int]) -> Any:
    """Return nested arguments with some numbers changed, by their position as counted by `numbers_in`."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([_changed(item, at, other, count) for item in tree])
    if isinstance(tree, bool) or not isinstance(tree, (int, float)):
        return tree
    count[0] += 1
    return other(tree) if count[0] - 1 in at else tree


def agreed(arrays: Sequence[Tensor], others: Sequence[Tensor] | None) -> list[Tensor]:
    """Return compact arrays of constants, NaN wherever those for other numbers differ.

    Example:
        >>> agreed([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 3.0])])
        [tensor([1., nan])]
    """
    if others is None:
        return [torch.full([1] * array.ndim, math.nan, dtype=array.dtype) for array in arrays]
    return [_met(array, other) for array, other in zip(arrays, others, strict=True)]


def _met(array: Tensor, other: Tensor) -> Tensor:
    other = uniform(other, [d for d in range(other.ndim) if other.size(d) != array.size(d)])
    return torch.where(array == other, array, math.nan)


def none_known(arrays: Sequence[Tensor]) -> bool:
    """Whether nothing is constant, so that numbers make no difference."""
    return all(bool(array.isnan().all()) for array in arrays)
