"""Squeezes: dimensions of size 1 go, so those that stay have to keep at least two entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.ops.shape import MOVES, shape_rule, source_of, through, view_labels
from engine.program.expressions import Apply, ShapeOf
from engine.program.graph import Node
from engine.rule import Demand, Sample, Shapes

__all__ = ["RULES"]


def _staying(node: Node) -> Iterator[int]:
    """Yield the dimensions that the op looks at, and that are longer than 1."""
    source = source_of(node)
    dims = node.args.get("dim", range(source.ndim))
    for dim in [dims] if isinstance(dims, int) else dims:
        if source.shape[dim] != 1:
            yield dim % source.ndim


def _demands(node: Node, keeps: object, shapes: Shapes) -> Iterator[Demand]:
    """Demand that no dimension which stays becomes one of size 1, which would go as well."""
    for dim in _staying(node):
        yield Demand(("squeezed", dim), False, False, expr=Apply("==", ShapeOf(source_of(node), dim), 1))


def _samples() -> Iterable[Sample]:
    yield through("squeeze", lambda x: x.unsqueeze(1).squeeze(1).contiguous().clone())
    yield through("squeeze of some", lambda x: x.unsqueeze(1).squeeze((1, 2)) * 2)


RULES = [shape_rule(["squeeze"], MOVES["squeeze"], view_labels, demands=_demands, samples=_samples)]
