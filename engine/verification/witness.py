"""Values to observe inside a model: the outputs of norms and contractions, at the channels that remain and matter."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.compaction.build import Analysis
from engine.ops.draws import draws
from engine.program.contraction import Contraction
from engine.program.graph import Node
from engine.rule import Statistic
from engine.surgery.kinds.norms import NarrowedNorm

__all__ = ["Channels", "Look", "Witness"]

Channels = Mapping[int, Tensor] | None


@dataclass(frozen=True, eq=False)
class Look:
    """The observed channels of a tensor.

    Attributes:
        dim: its channel dimension.
        channels: indices along it, or None for all.
        others: indices along other dimensions.
        sizes: minimum size of each dimension.
        size: number of channels with the example input, including those that are not observed.
    """

    dim: int
    channels: Tensor | None
    others: tuple[tuple[int, Tensor], ...]
    sizes: tuple[tuple[int, int], ...]
    size: int

    @classmethod
    def at(cls, dim: int, channels: Mapping[int, Tensor], size: int) -> Look:
        """Create a look from the indices by dimension, as in `Witness`."""
        others = tuple((d, index) for d, index in channels.items() if d != dim)
        sizes = tuple((d, int(index.max()) + 1) for d, index in channels.items())
        return cls(dim, channels.get(dim), others, sizes, size)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has all these indices."""
        return all(d < tensor.ndim and size <= tensor.size(d) for d, size in self.sizes)


@dataclass(frozen=True, eq=False)
class Witness:
    """The nodes to observe, and their channels before and after compaction.

    Attributes:
        nodes: in order of execution; every call of one of their ops is counted.
        dims: channel dimension of each; -1 for nodes that are counted but not observed.
        opaque: names of modules inside which nothing is observed.
        decided: whether data may decide on the path through the code.
        draws: calls that draw one random number per removable channel in eval mode.
        weights: attributes that a run sets to tensors computed from parameters alone, which are no results.
        before, after: indices to compare, by dimension, before and after compaction; None skips the node.
        sizes: for each dimension of a node's output, its size with the example input, before and after; None for a norm
            that stays as wide inside as it was.
    """

    nodes: tuple[Node, ...]
    dims: tuple[int, ...]
    before: tuple[Channels, ...]
    after: tuple[Channels, ...]
    sizes: tuple[tuple[tuple[int, int], ...] | None, ...] = ()
    opaque: tuple[str, ...] = ()
    decided: bool = False
    weights: frozenset[tuple[str, str]] = frozenset()
    draws: tuple[Node, ...] = ()

    @functools.cached_property
    def looks(self) -> tuple[tuple[Look | None, ...], tuple[Look | None, ...]]:
        """The channels to observe before and after compaction."""
        rows = list(zip(self.dims, self.nodes, self.sizes, strict=True))
        wide = [node.output.shape[dim] if node.output.ndim else 1 for dim, node, _ in rows]
        small = [n if sizes is None else sizes[dim][1] for n, (dim, _, sizes) in zip(wide, rows, strict=True)]
        before, after = (
            tuple(None if c is None else Look.at(d, c, n) for d, c, n in zip(self.dims, column, counts, strict=True))
            for column, counts in ((self.before, wide), (self.after, small))
        )
        return before, after

    @classmethod
    def of(cls, analysis: Analysis) -> Witness:
        """Select every norm and contraction, with the channels that remain and have an influence."""
        rules, kept = analysis.structure.rules, analysis.kept
        shifted = {
            consumer.node.index
            for consumer in kept.consumers
            if not consumer.carried
            and consumer.sink is not consumer.contraction.bias
            and consumer.removed(kept.shrunk.keep).any()
        }
        wide = {norm.module for norm in analysis.plan.of(NarrowedNorm)}
        nodes = [node for node in analysis.structure.graph.nodes if node.path == "eval"]
        computing = {n.index: c for n in nodes if (c := rules.contractions(n)) or rules.of(n).normalises}
        ops = {node.op for node in nodes if node.index in computing}
        rows: list[Any] = []
        for node in nodes:
            contractions = computing.get(node.index)
            if contractions is None or not node.output.ndim:  # a product of activations, or one number, has no channels
                rows += [(node, -1, None, None, None)] if node.op in ops else []
            else:
                dim = _channel_dim(analysis, node, contractions)
                sizes = tuple(zip(node.output.shape, kept.shrunk.shape(node.output), strict=True))
                channels = _channels(analysis, node, node.index in shifted)
                rows.append((node, dim, *channels, None if node.module in wide else sizes))
        graph = analysis.structure.graph
        columns: list[Any] = [tuple(column) for column in zip(*rows, strict=True)] if rows else [()] * 5
        witness_nodes, dims, before, after, sizes = columns
        return cls(
            witness_nodes, dims, before, after, sizes, graph.opaque, graph.decided, graph.weights, _draws(analysis)
        )


def _draws(analysis: Analysis) -> tuple[Node, ...]:
    shape = analysis.kept.shrunk.shape
    nodes = (node for node in analysis.structure.graph.nodes if node.path == "eval" and draws(node))
    return tuple(node for node in nodes if any(shape(value) != value.shape for value in node.outputs))


def _span(analysis: Analysis, node: Node) -> Statistic | None:
    statistic = analysis.structure.rules.of(node).statistic
    return None if statistic is None else statistic(node)


def _channel_dim(analysis: Analysis, node: Node, contractions: Sequence[Contraction]) -> int:
    """Return the channel dimension of a node: norms over channels declare it; else it is the first after the batch.

    For an op with contractions inside, it is the last.
    """
    if contractions:
        inside = contractions[0].output is not node.output
        return node.output.ndim - 1 if inside else contractions[0].output_dim
    span = _span(analysis, node)
    return min(1, node.output.ndim - 1) if span is None else span.dim


def _channels(analysis: Analysis, node: Node, skip: bool) -> tuple[Channels, Channels]:
    """Return the indices to compare along every dimension with slots, before and after compaction."""
    kept, value, span = analysis.kept, node.output, _span(analysis, node)
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    if skip or not kept.use[value].any():
        return None, None
    for dim in range(value.ndim):
        is_kept = kept.shrunk.indices(value, dim)
        if is_kept is not None:
            before[dim] = (is_kept & kept.use.along(value, dim)).nonzero()[:, 0]
            after[dim] = (is_kept.cumsum(0) - 1)[before[dim]]
            if span is not None and span.dim == dim:  # inside, such a norm is as wide as ever, group by group
                full = analysis.structure.graph.spans.get(node.module, len(is_kept)) // span.groups
                had, left = (int(n) // span.groups for n in (len(is_kept), is_kept.sum()))
                before[dim] = before[dim] // had * full + before[dim] % had
                after[dim] = after[dim] // left * full + after[dim] % left
    empty = any(not len(index) for index in before.values())
    return (None, None) if empty else (before, after)
