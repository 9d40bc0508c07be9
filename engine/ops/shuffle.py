"""Ops that exchange channels and positions: pixel (un)shuffle, channel shuffle, (un)fold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import move_labels, shape_rule, source_of, through
from engine.program.arrays import zero_where
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]


def _block(node: Node) -> int:
    """Number of channels that are merged into one, or that one is split into."""
    factor: int = node.args["upscale_factor" if node.op == "pixel_shuffle" else "downscale_factor"]
    return factor * factor


def _channels(row: Tensor, ndim: int) -> Tensor:
    return row.reshape([-1 if d == ndim - 3 else 1 for d in range(ndim)])


def _source_channels(node: Node, labels: Labels) -> Tensor | None:
    source = source_of(node)
    row = labels.along(source, source.ndim - 3)
    labels.without(source, [source.ndim - 2, source.ndim - 1], f"{node!r} rearranges it")
    return row


def _shuffle_labels(node: Node, labels: Labels) -> None:
    """Tie the r² channels that become one channel."""
    row = _source_channels(node, labels)
    if row is not None:
        blocks = row.view(-1, _block(node))
        labels.slots.union(blocks, blocks[:, :1])
        labels.add(node.output, _channels(blocks[:, 0], node.output.ndim))


def _shuffle_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    source = source_of(node)
    blocks = constants.along(source, source.ndim - 3).view(-1, _block(node))
    if constants.has_profile(source):
        blocks = torch.where(blocks == 0, blocks, math.nan)
    row = torch.where((blocks == blocks[:, :1]).all(1), blocks[:, 0], math.nan)
    return [_channels(row, node.output.ndim)]


def _shuffle_use(node: Node, use: Use) -> None:
    used = use.along(node.output, node.output.ndim - 3)
    use.add(source_of(node), _channels(used.repeat_interleave(_block(node)), node.output.ndim))


def _unshuffle_labels(node: Node, labels: Labels) -> None:
    """Tie the r² channels that a channel becomes."""
    row = _source_channels(node, labels)
    if row is not None:
        labels.add(node.output, _channels(row.repeat_interleave(_block(node)), node.output.ndim))


def _unshuffle_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    source = source_of(node)
    row = constants.along(source, source.ndim - 3)
    if constants.has_profile(source):
        row = torch.where(row == 0, row, math.nan)
    return [_channels(row.repeat_interleave(_block(node)), node.output.ndim)]


def _unshuffle_use(node: Node, use: Use) -> None:
    used = use.along(node.output, node.output.ndim - 3).reshape(-1, _block(node)).any(1)
    use.add(source_of(node), _channels(used, node.output.ndim))


# ---------------------------------------------------------------- patches


def _kernel(node: Node) -> int:
    """Number of entries in a patch of one channel."""
    return math.prod(node.args["kernel_size"])


def _patches_labels(node: Node, labels: Labels) -> None:
    """Tie the channels that a channel becomes, one per entry of a patch."""
    source = source_of(node)
    channel, positions = source.ndim - 3, (source.ndim - 2, source.ndim - 1)
    row = labels.along(source, channel)
    labels.without(source, positions, f"{node!r} cuts patches out of it")
    if row is not None:
        shape = [-1 if d == node.output.ndim - 2 else 1 for d in range(node.output.ndim)]
        labels.add(node.output, row.repeat_interleave(_kernel(node)).reshape(shape))


def _patches_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Constants propagate, except for patches that extend over the border."""
    source = source_of(node)
    row = constants.along(source, source.ndim - 3)
    if constants.has_profile(source) or any(node.args["padding"]):
        row = torch.where(row == 0, row, math.nan)
    return [row.repeat_interleave(_kernel(node)).reshape([1] * (node.output.ndim - 2) + [-1, 1])]


def _patches_use(node: Node, use: Use) -> None:
    source = source_of(node)
    used = use.along(node.output, node.output.ndim - 2).reshape(-1, _kernel(node)).any(1)
    use.add(source, _channels(used, source.ndim))


def _pasted_labels(node: Node, labels: Labels) -> None:
    """Tie the entries of a patch, which become one channel."""
    source = source_of(node)
    row = labels.along(source, source.ndim - 2)
    labels.without(source, [source.ndim - 1], f"{node!r} pastes patches of it")
    if row is not None:
        blocks = row.view(-1, _kernel(node))
        labels.slots.union(blocks, blocks[:, :1])
        labels.add(node.output, _channels(blocks[:, 0], node.output.ndim))


def _pasted_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Only zero propagates, since patches overlap unevenly."""
    source = source_of(node)
    blocks = constants.along(source, source.ndim - 2).view(-1, _kernel(node))
    return [_channels(zero_where((blocks == 0).all(1)), node.output.ndim)]


def _pasted_use(node: Node, use: Use) -> None:
    source = source_of(node)
    used = use.along(node.output, node.output.ndim - 3).repeat_interleave(_kernel(node))
    use.add(source, used.reshape([1] * (source.ndim - 2) + [-1, 1]))


# ---------------------------------------------------------------- channel shuffle


def _interleaved(node: Node, array: Tensor, position: int) -> Tensor:
    if array.size(1) == 1:
        return array
    groups = node.args["groups"]
    rows = array.reshape(array.size(0), groups, -1, *array.shape[2:])
    return rows.transpose(1, 2).reshape(array.shape)


def _interleave_labels(node: Node, labels: Labels) -> None:
    """Remove the same positions from each group, since the number of groups is written in the code."""
    row = labels.along(source_of(node), 1)
    if row is not None:
        rows = row.view(node.args["groups"], -1)
        labels.slots.union(rows, rows[:1])
    move_labels(_interleaved)(node, labels)


def _samples() -> Iterable[Sample]:
    yield through("channel_shuffle", lambda x: torch.channel_shuffle(x, 2))
    yield through("native_channel_shuffle", lambda x: torch.native_channel_shuffle(x, 4))
    yield through("pixel_shuffle", lambda x: torch.pixel_shuffle(x, 2), after=2)
    yield through("pixel_unshuffle", lambda x: torch.pixel_unshuffle(x, 2), after=32)
    yield through("unfold", lambda x: F.unfold(x, 2)[..., None], after=32)
    yield through("unfold over the border", lambda x: F.unfold(x, 3, padding=1)[..., None], after=72)
    yield through("fold", lambda x: F.fold(x.flatten(2)[..., :9], (4, 4), 2), after=2)
    yield through("unfold and fold", lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2))


RULES = [
    Rule(("pixel_shuffle",), _shuffle_labels, _shuffle_constants, _shuffle_use, samples=_samples),
    Rule(("pixel_unshuffle",), _unshuffle_labels, _unshuffle_constants, _unshuffle_use),
    Rule(("im2col",), _patches_labels, _patches_constants, _patches_use),
    Rule(("col2im",), _pasted_labels, _pasted_constants, _pasted_use),
    shape_rule(("channel_shuffle", "native_channel_shuffle"), _interleaved, _interleave_labels),
]
