"""Rows written where a mask is true: masked_scatter, which inserts the outputs of an image encoder between words.

The entries of the source are taken in order. If the mask is the same for all channels, each place that it selects takes
a row of the source, channel by channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import through
from engine.program.graph import Graph, Node, Value
from engine.rule import Rule, Sample

__all__ = ["RULES"]

_SAME_PLACES = frozenset("_to_copy to clone contiguous detach alias logical_not bitwise_not".split())


def _is_the_same_for_all_channels(graph: Graph, mask: Value) -> bool:
    """Whether a mask is expanded along the last dimension."""
    while mask.ndim and mask.shape[-1] > 1:
        node = None if mask.producer is None else graph.nodes[mask.producer]
        if node is None or node.op not in (*_SAME_PLACES, "expand", "expand_as"):
            return False
        mask = node.inputs[0]
    return mask.ndim > 0


def _operands(node: Node) -> tuple[Value, Value, Value]:
    return node.args["self"], node.args["mask"], node.args["source"]


def _writes_rows(node: Node, graph: Graph) -> bool:
    base, mask, source = _operands(node)
    same_width = source.ndim > 1 and source.shape[-1] == base.shape[-1] == node.output.shape[-1]
    return base.ndim > 1 and same_width and _is_the_same_for_all_channels(graph, mask)


def _labels(node: Node, labels: Labels) -> None:
    """Tie the last dimensions of base, mask and source; entries move along all others."""
    if not _writes_rows(node, labels.graph):
        for value in (*node.inputs, node.output):
            labels.freeze(value, f"{node!r} writes entries in order, across channels")
        return
    reason = f"{node!r} moves entries along it"
    for value in node.inputs:
        labels.claim(value)
        for layer in labels.without(value, range(value.ndim - 1), reason):
            labels.add(node.output, layer.reshape([1] * (node.output.ndim - 1) + [-1]))
    widths = [value for value in node.inputs if value.shape[-1] > 1]
    if any(labels.along(value, value.ndim - 1) is None for value in widths):
        labels.hold(node.output, {node.output.ndim - 1}, f"{node!r} combines it with a tensor of fixed size")


def _in_each_row(array: Tensor) -> Tensor:
    """Return the last dimension of an array: NaN where it differs along another one, or may do so at another size."""
    rows = array.reshape(-1, array.shape[-1])
    return rows[0] if len(rows) == 1 else torch.where((rows == 0).all(0), 0.0, math.nan)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """A channel with the same constant in base and source keeps it in the result."""
    if not _writes_rows(node, constants.graph):
        return None
    base, _, source = _operands(node)
    left, written = (_in_each_row(constants.plain(value)) for value in (base, source))
    return [torch.where(left == written, left, math.nan).view([1] * (node.output.ndim - 1) + [-1])]


def _use(node: Node, use: Use) -> None:
    base, mask, source = _operands(node)
    used = use[node.output]
    if not _writes_rows(node, use.constants.graph):
        for value in node.inputs:
            use.add_all(value)
        return
    use.add(base, used)
    use.add_all(mask)
    channels = used.reshape(-1, used.shape[-1]).any(0)
    use.add(source, channels.view([1] * (source.ndim - 1) + [-1]))


def _samples() -> Iterable[Sample]:
    def words(x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def places(x: Tensor) -> Tensor:
        """Every third place."""
        return x.new_ones(len(x), x.shape[2] * x.shape[3], 1).cumsum(1) % 3 == 1

    def written(x: Tensor) -> Tensor:
        return words(x).masked_scatter(places(x).expand_as(words(x)), words(x).tanh()).transpose(1, 2).reshape_as(x)

    def at_one_width(x: Tensor) -> Tensor:
        return words(x).masked_scatter(places(x), words(x).sigmoid()).transpose(1, 2).reshape_as(x)

    yield through("masked_scatter with a mask for all channels", written)
    yield through("masked_scatter with a mask of one channel", at_one_width)


RULES = [Rule(("masked_scatter",), _labels, _constants, _use, samples=_samples)]
