"""Reductions over positions or channels: sums, means, extremes, counts, norms and spreads."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import through
from engine.program.arrays import support, uniform
from engine.program.expressions import ShapeOf
from engine.program.graph import Graph, Node, Value
from engine.rule import Demand, Rare, Rule, Sample, Shapes, Statistic
from engine.surgery.edits import DIVISOR, SPREAD

__all__ = ["RULES"]


def _reduced(node: Node) -> list[int]:
    dims: Any = node.args.get("dim")
    ndim = node.inputs[0].ndim
    if dims is None or dims == []:
        return list(range(ndim))
    return [d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _without_dims(node: Node, array: Tensor) -> Tensor:
    if node.args.get("keepdim"):
        return array
    reduced = set(_reduced(node))
    return array.reshape([n for d, n in enumerate(array.shape) if d not in reduced])


def _reduce_labels(node: Node, labels: Labels) -> None:
    source = node.inputs[0]
    labels.claim(source)
    for layer in labels.without(source, _reduced(node), f"{node!r} runs over it"):
        for value in node.outputs:
            labels.add(value, _without_dims(node, layer))


def _add_labels(node: Node, labels: Labels) -> None:
    """Allow removal of zeros along the summed dimension, to which they add nothing, if only one has channels."""
    source, dims = node.inputs[0], _reduced(node)
    labels.claim(source)
    along = {dim for layer in labels.layers(source) for dim in support(layer)} & set(dims)
    layers = labels.layers(source) if len(along) < 2 else labels.without(source, dims, f"{node!r} runs over it")
    for layer in map(labels.settled, layers):
        if set(support(layer)) - set(dims):
            for value in node.outputs:
                labels.add(value, _without_dims(node, labels.tie(layer, dims)))


def _spread_labels(node: Node, labels: Labels) -> None:
    """The same, but for complex numbers, whose absolute squares are summed."""
    (_reduce_labels if node.inputs[0].dtype.is_complex else _add_labels)(node, labels)


def _added(node: Node) -> Iterable[Statistic]:
    return [Statistic(node.inputs[0], dim) for dim in _reduced(node)]


def _ignores_zeros(node: Node) -> bool:
    """Whether zeros add nothing: to a vector norm of positive order, and to a maximum norm."""
    order: Any = node.args["ord"]
    return order is None or not isinstance(order, str) and order > 0


def _length_labels(node: Node, labels: Labels) -> None:
    (_add_labels if _ignores_zeros(node) else _reduce_labels)(node, labels)


def _measured(node: Node) -> Iterable[Statistic]:
    return _added(node) if _ignores_zeros(node) else []


def _counted(name: str, node: Node, kept: Any, shapes: Shapes) -> Iterable[Demand]:
    """Keep counting the original number of entries."""
    written: Any = node.args.get("dim")
    dims = [written] if isinstance(written, int) else [*(written or ())]
    for span in _added(node):
        size = span.input.shape[span.dim]
        place = next((d + (d >= 0) for d in dims if d % span.input.ndim == span.dim), span.dim + 1)
        yield Demand((name, place * (len(dims) != 1)), size, size, ShapeOf(span.input, span.dim))


def _centre(node: Node, graph: Graph) -> Iterable[Statistic]:
    """Yield the channels of x where a node is the mean of squares of ``x - u``."""
    dims, difference = _reduced(node), _squared(_producer(node.inputs[0], graph))
    subtraction = None if difference is None else _producer(difference, graph)
    if subtraction is None or subtraction.op != "sub" or subtraction.args["alpha"] != 1:
        return
    x, subtrahend = subtraction.args["self"], subtraction.args["other"]
    if isinstance(subtrahend, Value) and subtrahend.ndim == x.ndim and x.shape == node.inputs[0].shape:
        if all(subtrahend.shape[dim] == 1 for dim in dims):
            yield from (Statistic(x, dim) for dim in dims)


def _producer(value: Value, graph: Graph) -> Node | None:
    return None if value.producer is None else graph.nodes[value.producer]


def _squared(node: Node | None) -> Value | None:
    """Return the value of which a node computes the square; None if it computes something else."""
    if node is None:
        return None
    is_square = node.op == "square" or node.op == "pow" and node.args.get("exponent") == 2
    is_product = node.op == "mul" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    return node.inputs[0] if is_square or is_product else None


def _reduce_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """A mean or maximum preserves a constant; a sum multiplies it by the same number of positions everywhere."""
    if node.op == "sum":
        constants.mark_profile(node.output)
    array = uniform(constants.plain(node.inputs[0]), _reduced(node))
    return [_without_dims(node, array)] * len(node.outputs)


def _zeros_add_nothing(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zeros everywhere result in zero, for any number of positions.

    With a single position, an unbiased spread is NaN in every channel, removed or not.
    """
    array = uniform(constants.plain(node.inputs[0]), _reduced(node))
    return [_without_dims(node, torch.where(array == 0, array, math.nan))] * len(node.outputs)


def _reduce_used(node: Node, use: Use) -> None:
    for value in node.outputs:
        used = use[value]
        if not node.args.get("keepdim"):
            for dim in sorted(_reduced(node)):
                used = used.unsqueeze(dim)
        use.add(node.inputs[0], used)


def _reduce_samples() -> Iterable[Sample]:
    yield through("largest", lambda x: x.amax((2, 3), keepdim=True) + x)
    yield through("smallest", lambda x: x.amin((2, 3), keepdim=True) + x)
    yield through("largest channel", lambda x: x.amax(1, keepdim=True) + x)
    yield through("smallest and largest", _largest_and_smallest)


def _mean_samples() -> Iterable[Sample]:
    yield through("mean over space", lambda x: x.mean((2, 3), keepdim=True) * x)
    yield through("mean over channels", lambda x: x.mean(1, keepdim=True) + x)
    yield through("RMS norm by hand", lambda x: x * (x.pow(2).mean(1, keepdim=True) + 0.1).rsqrt())


def _sum_samples() -> Iterable[Sample]:
    yield through("sum over space", lambda x: x + x.sum(-1, keepdim=True))
    yield through("sum over channels", lambda x: x / (1 + x.abs().sum(1, keepdim=True)))
    yield through("smallest", lambda x: x.amin((2, 3), keepdim=True) + x)


def _length_samples() -> Iterable[Sample]:
    yield through("normalised over channels", lambda x: F.normalize(x, dim=1))
    yield through("normalised by a norm of any kind", lambda x: x / (1 + torch.linalg.norm(x, dim=1, keepdim=True)))
    yield through("norm of a matrix", lambda x: x + torch.linalg.norm(x, "fro", (2, 3), keepdim=True))
    yield through("least length", lambda x: x / (1 + torch.linalg.vector_norm(x, -torch.inf, 1, keepdim=True)))


def _largest_and_smallest(x: Tensor) -> Tensor:
    smallest, largest = x.aminmax(dim=2, keepdim=True)
    return x * smallest + largest


def _count_samples() -> Iterable[Sample]:
    yield through("number of positive entries", lambda x: x * x.relu().count_nonzero(2)[:, :, None])
    yield through("whether any is positive", lambda x: x + x.relu().any(3, keepdim=True).to(x))
    yield through("sum without NaN", lambda x: x + x.nansum(3, keepdim=True))
    yield through("whether any channel is positive", lambda x: x + x.relu().any(1, keepdim=True).to(x))


def _soft_maximum_samples() -> Iterable[Sample]:
    yield through("soft maximum", lambda x: x * x.logsumexp((2, 3), keepdim=True))
    yield through("soft maximum of all channels", lambda x: x + x.logsumexp(1, keepdim=True))
    yield through("product", lambda x: x + x.tanh().prod(2, keepdim=True))
    yield through("whether all are positive", lambda x: x + (x > 0).all(2, keepdim=True).to(x))


def _spread_and_mean(x: Tensor) -> Tensor:
    spread, mean = torch.var_mean(x, (2, 3), keepdim=True)
    return (x - mean) / (1 + spread) + torch.std_mean(x, 2, keepdim=True)[1]


def _spread_samples() -> Iterable[Sample]:
    yield through("spread and mean", _spread_and_mean)
    yield through("spread", lambda x: x.std((2, 3), keepdim=True) + x.var((2, 3), keepdim=True) * x)
    yield through("spread over channels", lambda x: x / x.std(1, keepdim=True))


_EXTREMES = "amax amin aminmax".split()
_COUNTS = "any count_nonzero nansum".split()
_OF_ALL_POSITIONS = "all logsumexp prod".split()

RULES = [
    Rule(tuple(_EXTREMES), _reduce_labels, _reduce_constants, _reduce_used, elementwise=1, samples=_reduce_samples),
    Rule(
        ("mean",),
        _add_labels,
        _reduce_constants,
        _reduce_used,
        elementwise=1,
        demands=functools.partial(_counted, DIVISOR),
        only_zeros=_added,
        rare=Rare(centre=_centre),
        samples=_mean_samples,
    ),
    Rule(
        ("sum",),
        _add_labels,
        _reduce_constants,
        _reduce_used,
        elementwise=1,
        only_zeros=_added,
        samples=_sum_samples,
    ),
    Rule(
        ("linalg_norm", "linalg_vector_norm"),
        _length_labels,
        _zeros_add_nothing,
        _reduce_used,
        elementwise=1,
        only_zeros=_measured,
        samples=_length_samples,
    ),
    Rule(
        ("std", "std_mean", "var", "var_mean"),
        _spread_labels,
        _zeros_add_nothing,
        _reduce_used,
        elementwise=1,
        demands=functools.partial(_counted, SPREAD),
        only_zeros=_added,
        samples=_spread_samples,
    ),
    Rule(
        tuple(_COUNTS),
        _add_labels,
        _zeros_add_nothing,
        _reduce_used,
        elementwise=1,
        only_zeros=_added,
        samples=_count_samples,
    ),
    Rule(tuple(_OF_ALL_POSITIONS), _reduce_labels, use=_reduce_used, elementwise=1, samples=_soft_maximum_samples),
]
