"""Ops that take parts of a tensor: chunk, split, slice, narrow, select, unbind, unfold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from engine.analysis.constraints import Equal
from engine.analysis.labels import Labels
from engine.ops.samples import residual
from engine.ops.shape import Kept, Move, call_on, move_labels, shape_rule, source_of, through
from engine.program.arrays import support
from engine.program.graph import Graph, Node
from engine.rule import Demand, Rare, Sample, Shapes

__all__ = ["MOVES", "ONE", "RULES"]


def _dim(node: Node) -> int:
    dim: int = node.args["dim"]
    return dim % source_of(node).ndim


def _piece(node: Node, array: Tensor, position: int) -> Tensor:
    dim = _dim(node)
    if array.size(dim) == 1:
        return array
    start = sum(v.shape[dim] for v in node.outputs[:position])
    return array.narrow(dim, start, node.outputs[position].shape[dim])


def _sliced(node: Node, array: Tensor, position: int) -> Tensor:
    part: Tensor = array if array.size(_dim(node)) == 1 else call_on(node, array)
    return part if part.size(_dim(node)) else array.narrow(_dim(node), 0, 1)  # an empty part depends on no entry


def _selected(node: Node, array: Tensor, position: int) -> Tensor:
    dim = _dim(node)
    index = node.args["index"] if node.op == "select" else position
    return array.select(dim, 0 if array.size(dim) == 1 else index)


def _windows(node: Node, array: Tensor, position: int) -> Tensor:
    """Windows that may overlap, with their entries in a new last dimension."""
    dim = node.args["dimension"] % source_of(node).ndim
    if array.size(dim) == 1:
        return array.unsqueeze(-1)
    return array.unfold(dim, node.args["size"], node.args["step"])


def _window_labels(node: Node, labels: Labels) -> None:
    """Freeze the dimension, since the size and step of windows are written in the code."""
    source = source_of(node)
    labels.claim(source)
    labels.without(source, [node.args["dimension"] % source.ndim], f"{node!r} steps over it")
    move_labels(_windows)(node, labels)


def _freeze_following(node: Node, labels: Labels) -> None:
    """Freeze a dimension that is cut at a position computed from the input's size, which moves with that size."""
    if labels.amounts(node):
        labels.without(source_of(node), [_dim(node)], f"{node!r} cuts it at what follows the size of the input")


def _piece_labels(node: Node, labels: Labels) -> None:
    """Keep equally many entries in pieces of one size; freeze pieces of several sizes, unless the code lists them.

    A slot that also spans other dimensions is tied along this one: of the queries, keys and values of a head, the whole
    head.
    """
    source, dim = source_of(node), _dim(node)
    labels.claim(source)
    _freeze_following(node, labels)
    even = len({v.shape[dim] for v in node.outputs}) == 1 and "indices" not in node.args
    for layer in labels.layers(source):
        if dim not in support(layer) or len(node.outputs) == 1:
            continue
        if support(layer) != (dim,):
            labels.tie(layer, [dim])
        elif not even and node.op != "split_with_sizes":
            labels.slots.freeze(layer, f"the pieces of {node!r} are not of one size")
        elif node.op != "split_with_sizes":
            labels.constraints.append(Equal(layer.view(len(node.outputs), -1)))
    move_labels(_piece)(node, labels)


def _picked_labels(node: Node, labels: Labels) -> None:
    """Freeze the dimension: the index is written in the code, or there is one output per index.

    The first and last index always exist, so they do not freeze it if only the shape of the result is read.
    """
    source = source_of(node)
    labels.claim(source)
    dim = _dim(node)
    for_shape = node.args.get("index") in (0, -1) and labels.graph.unread(node)
    for layer in labels.layers(source):
        if support(layer) == (dim,):
            if not for_shape:
                labels.slots.freeze(layer, f"{node!r} picks single indices from it")
            continue
        if not (labels.is_ragged(layer) and support(layer)[-1] != dim):  # independent rows may be selected separately
            layer = labels.tie(layer, [dim] if layer.size(dim) > 1 else [])
        for k, value in enumerate(node.outputs):
            labels.add(value, _selected(node, layer, k))


def _beside_the_picked(node: Node, graph: Graph) -> Mapping[int, int]:
    """Return the dimensions that are independent of the chosen index: all others."""
    picked = _dim(node)
    return {dim: dim - (dim > picked) for dim in range(source_of(node).ndim) if dim != picked}


def _slice_labels(node: Node, labels: Labels) -> None:
    source = source_of(node)
    labels.claim(source)
    _freeze_following(node, labels)
    if node.args.get("step", 1) != 1:
        _step_labels(node, labels)
    for layer in labels.layers(source):
        alone = node.output.shape[_dim(node)] == 1 < layer.size(_dim(node))
        if alone and not labels.is_ragged(layer):  # a tensor of size 1 has no slots to tie
            labels.slots.freeze(_sliced(node, layer, 0), f"{node!r} takes it alone")
    move_labels(_sliced)(node, labels)


def _step_labels(node: Node, labels: Labels) -> None:
    """Tie the entries between two steps, where the whole dimension is stepped over as in ``x[..., ::2]``."""
    source, dim, step = source_of(node), _dim(node), node.args["step"]
    start, size = node.args["start"] or 0, source.shape[dim]
    if not 0 <= start < step or size % step or (node.args["end"] or size) < size:
        labels.without(source, [dim], f"{node!r} steps over it")
        return
    for layer in labels.layers(source):
        if support(layer) == (dim,):
            blocks = layer.reshape(-1, step)
            labels.slots.union(blocks, blocks[:, :1])
        elif dim in support(layer):
            labels.tie(layer, [dim])


def _piece_demands(node: Node, kept: Kept, shapes: Shapes) -> Iterator[Demand]:
    """Demand the number of kept entries of each piece; a piece of one entry has no slots of its own to query."""
    dim = _dim(node)
    keep = kept(source_of(node), dim)
    if node.op == "split":
        size = node.args["split_size"]  # more than there is gives one part, of whatever size
        yield Demand(("split_size", 0), size, size if size > node.output.shape[dim] else shapes(node.output)[dim])
    if node.op == "split_with_sizes" and keep is not None:
        for position, piece in enumerate(keep.split([v.shape[dim] for v in node.outputs])):
            yield Demand(("split_sizes", position), node.args["split_sizes"][position], int(piece.sum()))


def _slice_demands(node: Node, kept: Kept, shapes: Shapes) -> Iterator[Demand]:
    """Demand the number of kept entries on each bound's side of the cut; the start of a strided slice stays."""
    keep = kept(source_of(node), _dim(node)) if node.args.get("step", 1) == 1 else None
    start = node.args["start"] or 0
    for name in ("start", "end", "length"):
        bound = node.args.get(name)
        if keep is None or bound is None or bound == 0 or abs(bound) >= len(keep):
            continue  # also afterwards nothing lies beyond the bound
        if name == "length":
            wanted = int(keep[start : start + bound].sum())
        else:
            # counted from the end, an empty part cannot be expressed: -0 is the start
            wanted = int(keep[:bound].sum()) if bound > 0 else -int(keep[bound:].sum()) or sys.maxsize
        yield Demand((name, 0), bound, wanted)


def _samples() -> Iterable[Sample]:
    def halves(x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], x[:, :half]], 1)

    yield through("slice at half of the channels", halves)
    yield through("slice at a number", lambda x: x[:, :4], after=4)
    yield through("slice from the end", lambda x: x[:, -4:], after=4)
    yield through("slice from further than the end", lambda x: x[:, -99:])
    yield through("one channel for all", lambda x: x[:, 0:1] + x)
    yield through("strided", lambda x: x[:, ::2, ::2], after=4)
    yield through("neighbours", lambda x: x[:, ::2].sigmoid() * x[:, 1::2], after=4)
    yield through("narrow", lambda x: x.narrow(2, 1, 2))
    yield through("windows", lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2).mean((4, 5)))
    yield through("windows of channels", lambda x: x.unfold(1, 2, 2).sum(-1), after=4)
    yield through("chunk", lambda x: residual(*x.chunk(2, 1)), after=4)
    yield through("split", lambda x: residual(*x.split(4, 1)), after=4)
    yield through("split into one part", lambda x: residual(*x.split(9, 1), *x.split(7, 2)))
    yield through("split by half", lambda x: residual(*x.split(x.shape[1] // 2, 1)), after=4)
    yield through("split with sizes", lambda x: torch.cat(x.split([3, 5], 1), 1))
    yield through("tensor_split", lambda x: residual(*x.tensor_split(2, 1)), after=4)
    yield through("tensor_split at positions", lambda x: torch.cat(x.tensor_split([1], 2)[::-1], 2))
    yield through("tensor_split at a channel", lambda x: residual(*x.tensor_split([4], 1)), after=4)
    yield through("select", lambda x: x.select(1, 2)[:, None] * x)
    yield through("unbind", lambda x: torch.stack(x.unbind(2), 3))


ONE = ("select", "unbind")
"""Ops that take a single index of a dimension, or each index separately."""

_PIECES = ("chunk", "split", "split_with_sizes", "tensor_split")
MOVES: Mapping[str, Move] = (
    dict.fromkeys(_PIECES, _piece)
    | dict.fromkeys(("slice", "narrow"), _sliced)
    | dict.fromkeys(ONE, _selected)
    | {"unfold": _windows}
)

RULES = [
    shape_rule(_PIECES, _piece, _piece_labels, demands=_piece_demands),
    shape_rule(("slice", "narrow"), _sliced, _slice_labels, demands=_slice_demands, samples=_samples),
    shape_rule(ONE, _selected, _picked_labels, rare=Rare(preserved=_beside_the_picked)),
    shape_rule(("unfold",), _windows, _window_labels),
]
