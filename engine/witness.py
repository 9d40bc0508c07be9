"""Where to look inside a model: every norm and contraction, at the channels that stay and have an influence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.build import Analysis
from engine.graph import Node

__all__ = ["Witness"]


@dataclass(frozen=True, eq=False)
class Witness:
    """Which nodes to look at, and which of their channels, before and after compaction.

    Attributes:
        nodes: in order of execution; every call of one of their ops is counted.
        dims: channel dimension of each.
        before, after: indices of the channels to compare, or None for all; an empty index skips the node.
    """

    nodes: tuple[Node, ...]
    dims: tuple[int, ...]
    before: tuple[Tensor | None, ...]
    after: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, analysis: Analysis) -> Witness:
        """Look at every norm and contraction: channels that stay and have an influence."""
        rules, kept = analysis.structure.rules, analysis.kept
        shifted = {
            consumer.node.index
            for consumer in kept.consumers
            if not consumer.carried
            and consumer.sink is not consumer.contraction.bias
            and consumer.removed(kept.shrunk.keep).any()
        }
        rows = []
        for node in analysis.structure.graph.nodes:
            contraction = rules.contraction(node)
            if node.path == "eval" and (contraction is not None or rules.rule(node.op).normalises):
                dim = _channel_dim(analysis, node) if contraction is None else contraction.output_dim
                rows.append((node, dim, *_channels(analysis, node, dim, node.index in shifted)))
        return cls(*(tuple(column) for column in zip(*rows, strict=True))) if rows else cls((), (), (), ())


def _channel_dim(analysis: Analysis, node: Node) -> int:
    """Norms over channels say which dimension that is; for all others it is the first after the batch."""
    statistic = analysis.structure.rules.rule(node.op).statistic
    span = None if statistic is None else statistic(node)
    return min(1, node.output.ndim - 1) if span is None else span.dim


def _channels(analysis: Analysis, node: Node, dim: int, skip: bool) -> tuple[Tensor | None, Tensor | None]:
    none = torch.zeros(0, dtype=torch.long)
    if skip:
        return none, none
    stays = analysis.kept.shrunk.indices(node.output, dim)
    if stays is None:
        return (None, None) if analysis.kept.use[node.output].any() else (none, none)
    before = (stays & analysis.kept.use.along(node.output, dim)).nonzero()[:, 0]
    return before, (stays.cumsum(0) - 1)[before]
