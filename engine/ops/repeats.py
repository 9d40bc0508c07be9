"""Ops that repeat entries along dimensions: repeat, tile, repeat_interleave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from engine.analysis.labels import Labels
from engine.ops.shape import move_labels, shape_rule, source_of, through
from engine.program.graph import Node
from engine.rule import Demand, Rule, Sample, Shapes

__all__ = ["RULES"]


# ---------------------------------------------------------------- whole tensors, one behind the other


def _argument(node: Node) -> str:
    return "dims" if node.op == "tile" else "repeats"


def _times(node: Node) -> list[int]:
    """Return how often each dimension of the output is repeated; `tile` may name the last ones only."""
    times: Sequence[int] = node.args[_argument(node)]
    return [1] * (node.output.ndim - len(times)) + list(times)


def _repeated(node: Node, array: Tensor, position: int) -> Tensor:
    times = _times(node)
    array = array.reshape([1] * (len(times) - array.ndim) + list(array.shape))
    return array.repeat([n if array.size(d) > 1 else 1 for d, n in enumerate(times)])


def _filled(node: Node) -> list[int]:
    """Return the dimensions whose size is a number of repeats: those of size 1, and new ones in front."""
    shape, times = source_of(node).shape, _times(node)
    offset = len(times) - len(shape)
    return [dim for dim, n in enumerate(times) if n > 1 and (dim < offset or shape[dim - offset] == 1)]


def _repeat_labels(node: Node, labels: Labels) -> None:
    """A repeated dimension of size 1 gets new slots, as an expanded one does."""
    move_labels(_repeated)(node, labels)
    for layer in labels.fresh(node.output, _filled(node)):
        labels.add(node.output, layer)


def _repeat_demands(node: Node, keeps: object, shapes: Shapes) -> Iterable[Demand]:
    wanted, filled, name = shapes(node.output), set(_filled(node)), _argument(node)
    first = node.output.ndim - len(node.args[name])
    for position, times in enumerate(node.args[name]):
        dim = first + position
        size = wanted[dim] if dim in filled else times
        yield Demand((name, position), times, size, dim=dim if dim in filled else None)


# ---------------------------------------------------------------- each entry several times


def _interleaved(node: Node, array: Tensor, position: int) -> Tensor:
    dim = node.args["dim"] % array.ndim
    return array if array.size(dim) == 1 else array.repeat_interleave(node.args["repeats"], dim)


def _counted(node: Node) -> bool:
    """Whether every entry of one dimension is repeated equally often, by a number in the code."""
    return isinstance(node.args["repeats"], int) and node.args["dim"] is not None


def _interleaved_labels(node: Node, labels: Labels) -> None:
    if not _counted(node):
        for value in node.inputs:
            labels.freeze(value, f"{node!r} repeats its entries")
        return
    move_labels(_interleaved)(node, labels)
    dim = node.args["dim"] % source_of(node).ndim
    if source_of(node).shape[dim] == 1:
        labels.fix(node.output, dim)


def _interleave_rule() -> Rule:
    rule = shape_rule(["repeat_interleave"], _interleaved, _interleaved_labels)
    other = Rule((), _interleaved_labels)
    return replace(
        rule,
        constants=lambda node, constants: (rule if _counted(node) else other).constants(node, constants),
        use=lambda node, use: (rule if _counted(node) else other).use(node, use),
    )


# ---------------------------------------------------------------- samples


def _repeat_samples() -> Iterable[Sample]:
    yield through("repeat", lambda x: x.repeat(1, 2, 1, 1), after=16)
    yield through("repeat over channels", lambda x: x * x.mean(1, keepdim=True).repeat(1, x.shape[1], 1, 1))
    yield through("tile", lambda x: x.tile(2, 1, 1), after=16)
    yield through("tile over channels", lambda x: x * x.mean(1, keepdim=True).tile(x.shape[1], 1, 1))
    yield through("tile with a new dimension", lambda x: x.tile(2, 1, 1, 1, 1).mean(0))


def _interleave_samples() -> Iterable[Sample]:
    yield through("repeat_interleave", lambda x: x.repeat_interleave(2, 1), after=16)
    yield through("repeat_interleave over space", lambda x: x.repeat_interleave(2, 2))


RULES = [
    shape_rule(["repeat", "tile"], _repeated, _repeat_labels, demands=_repeat_demands, samples=_repeat_samples),
    replace(_interleave_rule(), samples=_interleave_samples),
]
