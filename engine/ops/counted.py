"""Products that are counted, and of which no channel is removed, since they are rare."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.analysis.labels import Labels
from engine.program.graph import Node
from engine.rule import Rule, Shapes

__all__ = ["RULES"]

Sizes = Callable[[int], tuple[int, ...]]


def _labels(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"{node.op} has no rule for channels ({node!r})")


def _counted(*ops: str, macs: Callable[[Node, Sizes, int], int]) -> Rule:
    """Return a rule that counts by the shapes of the inputs, counted from the end, and the entries of the result."""

    def count(node: Node, shapes: Shapes) -> int:
        return macs(node, lambda place: shapes(node.inputs[place]), math.prod(shapes(node.output)))

    return Rule(ops, _labels, macs=count)


def _inner(node: Node, sizes: Sizes, entries: int) -> int:
    """Each entry sums over the last dimension; there is none if a factor is a single number."""
    return entries * (sizes(-1)[-1] if sizes(-1) and sizes(-2) else 1)


def _over_dims(node: Node, sizes: Sizes, entries: int) -> int:
    """Each entry sums over the dimensions of the first factor that are named."""
    return entries * math.prod(sizes(0)[dim] for dim in node.args["dims_self"])


def _paired(node: Node, sizes: Sizes, entries: int) -> int:
    """Each entry sums over one dimension, which one of the factors may repeat."""
    return entries * max(sizes(place)[node.args["dim"]] for place in (0, 1))


def _bilinear(node: Node, sizes: Sizes, entries: int) -> int:
    """Three factors in each term, as in an einsum."""
    return 2 * entries * sizes(0)[-1] * sizes(1)[-1]


RULES = [
    _counted("addmv", macs=lambda node, sizes, entries: math.prod(sizes(-2))),
    _counted("outer", "ger", "addr", macs=lambda node, sizes, entries: entries),
    _counted("addbmm", macs=lambda node, sizes, entries: math.prod(sizes(-2)) * sizes(-1)[-1]),
    _counted("inner", macs=_inner),
    _counted("tensordot", macs=_over_dims),
    _counted(
        "linalg_vecdot",
        macs=lambda node, sizes, entries: entries * max(s[node.args["dim"]] for s in map(sizes, (0, 1))),
    ),
    _counted("bilinear", macs=_bilinear),
    _counted("conv_tbc", macs=lambda node, sizes, entries: entries * math.prod(sizes(1)[:2])),
]
