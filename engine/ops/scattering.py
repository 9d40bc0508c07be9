"""Ops that read or write along one dimension, each channel at an index of its own: gather, scatter, scatter_reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import through
from engine.program.arrays import support
from engine.program.graph import Node, Value
from engine.rule import Rule, Sample

__all__ = ["RULES"]

_SUMS = ("add", "sum")  # the names that `scatter` and `scatter_reduce` give a sum


def _operands(node: Node) -> list[Value]:
    return [value for name in ("self", "index", "src") if isinstance(value := node.args.get(name), Value)]


def _dim(node: Node) -> int:
    dim: int = node.args["dim"] % max(node.args["self"].ndim, 1)
    return dim


def _aligned(node: Node) -> bool:
    """Whether the tensors correspond entry by entry along all other dimensions: an index may cover fewer entries."""
    shapes = {tuple(n for d, n in enumerate(value.shape) if d != _dim(node)) for value in _operands(node)}
    return len(shapes) == 1


def _labels(node: Node, labels: Labels) -> None:
    """Tie all tensors along every dimension except the indexed one, which is frozen."""
    operands, dim = _operands(node), _dim(node)
    if not _aligned(node):
        for value in operands:
            labels.freeze(value, f"{node!r} covers a part of it")
        return
    for value in operands:
        labels.claim(value)
        for layer in labels.without(value, [dim], f"{node!r} moves entries along it"):
            labels.add(node.output, layer)
    for value in operands:
        slotted_dims = {d for layer in labels.layers(value) for d in support(layer)}
        fixed = {d for d, size in enumerate(value.shape) if d != dim and size > 1} - slotted_dims
        labels.hold(node.output, fixed, f"{node!r} combines it with a tensor of fixed size")


def _along(node: Node, array: Tensor) -> Tensor:
    """Return an array without the indexed dimension: NaN where it differs along it."""
    dim = _dim(node)
    first = array.narrow(dim, 0, 1)
    return torch.where((array == first).all(dim, keepdim=True), first, math.nan)


def _gathered(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """A channel that is constant along the dimension has this constant at any index."""
    array = constants.plain(node.args["self"])
    if array.size(_dim(node)) > 1:  # at another size it may not be
        array = torch.where((array == 0).all(_dim(node), keepdim=True), 0.0, math.nan)
    return [array] if _aligned(node) else None


def _gather_used(node: Node, use: Use) -> None:
    """The index does not matter where the source is constant along the dimension."""
    source, index, used = node.args["self"], node.args["index"], use[node.output]
    if not _aligned(node):
        for value in node.inputs:
            use.add_all(value)
        return
    use.add(source, used.any(_dim(node), keepdim=True))
    use.add(index, used & _along(node, use.constants.plain(source)).isnan())


def _written(node: Node, constants: Constants) -> Tensor:
    """Return the written values; a number is written to all channels."""
    source = node.args.get("src", node.args.get("value"))
    return (
        _along(node, constants.plain(source))
        if isinstance(source, Value)
        else torch.full([1] * node.output.ndim, float(source), dtype=torch.float64)
    )


def _adds(node: Node) -> bool:
    return node.op == "scatter_add" or node.args.get("reduce") in _SUMS


def _unmoved(node: Node, constants: Constants) -> Tensor:
    """Whether the result is the base wherever the index points."""
    written = _written(node, constants)
    if _adds(node):
        return written == 0 if node.args.get("include_self", True) else torch.zeros_like(written, dtype=torch.bool)
    base = _along(node, constants.plain(node.args["self"]))
    same = (base == written) & (written == 0)
    return base == written if node.args.get("reduce") in (None, "amax", "amin") else same


def _scattered(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """The base, where what is written changes nothing at any index."""
    if not _aligned(node):
        return None
    return [torch.where(_unmoved(node, constants), constants.plain(node.args["self"]), math.nan)]


def _scatter_used(node: Node, use: Use) -> None:
    used = use[node.output]
    if not _aligned(node):
        for value in node.inputs:
            use.add_all(value)
        return
    use.add(node.args["self"], used)
    for value in _operands(node)[1:]:
        everywhere = used.any(_dim(node), keepdim=True)
        moved = everywhere & ~_unmoved(node, use.constants) if value is node.args["index"] else everywhere
        use.add(value, moved)


def _samples() -> Iterable[Sample]:
    def order(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 1, 2, 1, dtype=torch.long) + torch.tensor([2, 0])[:, None]

    def index(x: Tensor) -> Tensor:
        return order(x).expand(-1, x.shape[1], -1, x.shape[3])

    def gathered(x: Tensor) -> Tensor:
        return x.gather(2, index(x)) + x.mean((2, 3), keepdim=True)

    def repeated(x: Tensor) -> Tensor:
        return x.gather(2, order(x).repeat(1, x.shape[1], 1, x.shape[3]))

    def added(x: Tensor) -> Tensor:
        written = x[:, :, :2].tanh()
        return torch.zeros_like(x).scatter_add_(2, order(x).expand_as(written), written)

    def replaced(x: Tensor) -> Tensor:
        return x.scatter(2, index(x), x[:, :, :2].sigmoid())

    def largest(x: Tensor) -> Tensor:
        return x.scatter_reduce(2, index(x), x[:, :, :2].tanh(), "amax")

    def averaged(x: Tensor) -> Tensor:
        return x.scatter_reduce(2, index(x), x[:, :, :2], "mean", include_self=False)

    yield through("gather at one index for all channels", gathered)
    yield through("gather at a repeated index", repeated)
    yield through("scatter_add", added)
    yield through("scatter", replaced)
    yield through("scatter_reduce, largest", largest)
    yield through("scatter_reduce, mean", averaged)


RULES = [
    Rule(("gather",), _labels, _gathered, _gather_used, samples=_samples),
    Rule(("scatter", "scatter_add", "scatter_reduce"), _labels, _scattered, _scatter_used),
]
