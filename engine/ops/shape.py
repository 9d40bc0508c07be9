"""Shape ops: they move entries without computing, so labels, constants and use move along.

Each op needs a single function that moves a compact array like the op moves the tensor; `shape_rule` derives the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import Apply, chain
from engine.program.arrays import support, view_array, zero_where
from engine.program.expressions import Apply as Computed
from engine.program.expressions import Expr, ShapeOf
from engine.program.graph import Graph, Node, Origin, Value
from engine.rule import Demand, Rare, Rule, Sample, Shapes
from engine.surgery.kinds.attention import head_sizes

__all__ = [
    "MOVES",
    "RULES",
    "SAME",
    "TURNED",
    "Kept",
    "Move",
    "call_on",
    "expanded",
    "move_labels",
    "shape_rule",
    "size_demands",
    "source_of",
    "through",
    "view_labels",
]

Move = Callable[[Node, Tensor, int], Tensor]
"""(node, compact array of the input, position of an output) -> compact array of that output."""

Kept = Callable[[Value, int], Tensor | None]
"""(value, dimension) -> which indices are kept, bool; None if nothing along it can be removed."""


def source_of(node: Node) -> Value:
    """Return the tensor that a shape op moves."""
    return node.inputs[0]


def call_on(node: Node | Origin, array: Tensor) -> Any:
    """Call the op itself with an array in place of its tensor."""
    return node.target(*(array if isinstance(v, Value) else v for v in node.args.values()))


# ---------------------------------------------------------------- the three analyses, shared by all shape ops


def move_labels(move: Move) -> Callable[[Node, Labels], None]:
    """Return a label function that moves labels along with the entries."""

    def labels(node: Node, labels: Labels) -> None:
        labels.claim(source_of(node))
        for layer in labels.layers(source_of(node)):
            for k, value in enumerate(node.outputs):
                labels.add(value, move(node, layer, k))

    return labels


def _constants(move: Move) -> Callable[[Node, Constants], Sequence[Tensor]]:
    def constants(node: Node, constants: Constants) -> Sequence[Tensor]:
        source = source_of(node)
        moved = [move(node, constants[source], k) for k in range(len(node.outputs))]
        if not constants.has_profile(source):
            return moved
        if any(array.numel() > constants[source].numel() for array in moved):
            # Positions become channels, each with its own entry of the shared map.
            return [move(node, constants.plain(source), k) for k in range(len(node.outputs))]
        for value in node.outputs:
            constants.mark_profile(value)
        return moved

    return constants


def _use(move: Move) -> Callable[[Node, Use], None]:
    def places(node: Node, shape: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
        """The source position of each entry of the outputs."""
        numbered = torch.arange(math.prod(shape)).view(shape)
        return [move(node, numbered, k).numpy() for k in range(len(node.outputs))]

    def use(node: Node, use: Use) -> None:
        source = source_of(node)
        shape = tuple(use.shape(source))
        if math.prod(shape) == 1 or 0 in source.shape:  # one entry stands for all of them
            used_at_all = any(bool(use[value].numpy().any()) for value in node.outputs)
            use.add(source, torch.full(shape, used_at_all))
            return
        came_from = use.graph.derived((move, node, shape), lambda: places(node, shape))
        hit = np.zeros(math.prod(shape), dtype=np.bool_)
        for value, positions in zip(node.outputs, came_from, strict=True):
            where, used = np.broadcast_arrays(positions, use[value].numpy())
            hit[where[used]] = True
        use.add(source, torch.from_numpy(hit).view(shape))

    return use


def shape_rule(ops: Iterable[str], move: Move, labels: Any = None, **more: Any) -> Rule:
    """Return the rule of ops that move entries by ``move``; ``labels`` replaces the default label function."""
    return Rule(ops=tuple(ops), labels=labels or move_labels(move), constants=_constants(move), use=_use(move), **more)


# ---------------------------------------------------------------- moves, by op


def _same(node: Node, array: Tensor, position: int) -> Tensor:
    return array


def _view(node: Node, array: Tensor, position: int) -> Tensor:
    return view_array(array, source_of(node).shape, node.outputs[position].shape)


def _permuted(node: Node, array: Tensor, position: int) -> Tensor:
    moved: Tensor = call_on(node, array)
    return moved


def expanded(node: Node, array: Tensor, position: int) -> Tensor:
    """Compact array after dimensions of size 1 are expanded: only new leading dimensions are added."""
    return array.reshape([1] * (node.output.ndim - array.ndim) + list(array.shape))


def _is_position(node: Node, dim: int, labels: Labels) -> bool:
    """Whether the code takes a size from a dimension without slots, such as ``x.shape[2]`` of a resolution."""
    expr = next((e for (name, at), e in node.sizes.items() if at == dim and name in ("size", "shape")), None)
    return expr is not None and _is_fixed(expr, labels)


def _is_fixed(expr: Expr, labels: Labels) -> bool:
    if isinstance(expr, Computed):
        return expr.symbol == "*" and _is_fixed(expr.left, labels) and _is_fixed(expr.right, labels)
    return isinstance(expr, ShapeOf) and all(expr.dim not in support(layer) for layer in labels.layers(expr.value))


def view_labels(node: Node, labels: Labels) -> None:
    """Freeze merged dimensions of which one merely repeats the other (``expand``).

    A dimension laid out along positions (``reshape(b, c, h, w)`` of tokens that were not transposed) is frozen too:
    where each entry lands depends on the resolution.
    """
    source, target = source_of(node), node.output
    labels.claim(source)
    if 0 in source.shape:
        labels.freeze(source, f"{node!r} moves what is empty at the example's size")
    moved = [(layer, _view(node, layer, 0)) for layer in labels.layers(source)]
    for position, (layer, array) in enumerate(moved):
        dims = set(support(array))
        merged = [other for k, (_, other) in enumerate(moved) if k != position and dims & set(support(other))]
        if merged and not labels.can_go(layer):
            labels.slots.freeze(layer, f"{node!r} merges it with another axis")
        elif len(dims) > 1 and any(_is_position(node, d, labels) for d in support(labels.settled(array))):
            labels.slots.freeze(layer, f"{node!r} lays it out along positions")
        else:
            labels.add(target, array)


def _preserved(argument: str) -> Callable[[Node, Graph], Mapping[int, int]]:
    """Return a function that returns the dimensions that a view preserves, whatever its sizes in the middle are.

    They lie at both ends, where the code passes the tensor's own sizes: ``x.view(x.shape[0], side, side, x.shape[2])``
    leaves the first and the last alone for any side, because there are no more entries than before.
    """

    def preserved(node: Node, graph: Graph) -> Mapping[int, int]:
        source, target = source_of(node), node.output
        pairs: dict[int, int] = {}
        for start, step in ((0, 1), (-1, -1)):
            for k in range(min(source.ndim, target.ndim) - len(pairs)):
                dim, other = (start + step * k) % source.ndim, (start + step * k) % target.ndim
                if not _is_size_of(node.sizes.get((argument, other)), source, dim, graph):
                    break
                pairs[dim] = other
        return pairs

    return preserved


def _is_size_of(expr: Expr | None, value: Value, dim: int, graph: Graph) -> bool:
    """Whether code passes the size of a dimension, possibly as that of a tensor of which this one is a view."""
    while isinstance(expr, Computed) and expr.symbol == "*" and expr.left == 1:
        expr = expr.right
    if not isinstance(expr, ShapeOf):
        return False
    place: tuple[Value, int] | None = (value, dim)
    while place is not None and place[0].index != expr.value.index:
        place = _before(*place, graph)
    return place is not None and place[1] == expr.dim


def _before(value: Value, dim: int, graph: Graph) -> tuple[Value, int] | None:
    """Return the tensor that a value is a view of, and the corresponding dimension; None if there is none."""
    node = None if value.producer is None else graph.nodes[value.producer]
    if node is None or node.op not in MOVES:
        return None
    source, position = source_of(node), node.outputs.index(value)
    for other, size in enumerate(source.shape):
        numbers = torch.arange(size)
        moved = MOVES[node.op](node, numbers.view([size if d == other else 1 for d in range(source.ndim)]), position)
        if size > 1 and support(moved) == (dim,) and moved.numel() == size and bool((moved.flatten() == numbers).all()):
            return source, other
    return None


def _cast(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Cast constants to the output's dtype, in which 0.5 may be 0; of complex numbers only the zeros are known."""
    array = _constants(_same)(node, constants)[0]
    if node.output.dtype.is_complex:
        return [zero_where(array == 0)]
    return [torch.where(array.isnan(), array, array.nan_to_num().to(node.output.dtype).double())]


def _rolled_labels(node: Node, labels: Labels) -> None:
    """Freeze rolled dimensions, since the shift is written in the code."""
    source = source_of(node)
    dims = [d % source.ndim for d in node.args["dims"]] or list(range(source.ndim))
    labels.without(source, dims, f"{node!r} rolls it")
    if node.args["dims"]:
        move_labels(_permuted)(node, labels)


def _as_other(labels_of: Callable[[Node, Labels], None]) -> Callable[[Node, Labels], None]:
    """Tie the result to the tensor whose size it takes, dimension by dimension."""

    def labels(node: Node, labels: Labels) -> None:
        labels_of(node, labels)
        other, target = node.args["other"], node.output
        mine, theirs = ({support(layer) for layer in labels.layers(v)} for v in (target, other))
        for value, supports in ((other, mine), (target, theirs)):
            for layer in labels.layers(value):
                if support(layer) not in supports:
                    labels.slots.freeze(layer, f"{node!r} takes the size of a tensor that keeps its channels")
        for layer in labels.layers(other):
            labels.add(target, layer)

    return labels


def _expand_labels(node: Node, labels: Labels) -> None:
    """An expanded dimension of size 1 gets new slots: it takes the size of the tensor that it meets."""
    move_labels(expanded)(node, labels)
    source, target = source_of(node), node.output
    offset = target.ndim - source.ndim
    new = [d for d in range(target.ndim) if d < offset or source.shape[d - offset] == 1 < target.shape[d]]
    for layer in labels.fresh(target, new):
        labels.add(target, layer)


def size_demands(argument: str, node: Node, shapes: Shapes, first: int = 0) -> Iterator[Demand]:
    """Demand the sizes of the output, one integer per dimension starting at ``first``; -1 needs no update."""
    wanted = shapes(node.output)
    for position, size in enumerate(node.args[argument]):
        if size != -1:
            yield Demand((argument, position), size, wanted[first + position], dim=first + position)


def _view_demands(node: Node, keeps: object, shapes: Shapes) -> Iterable[Demand]:
    """None if torch itself makes the view: a write by index drops leading dimensions of what it writes."""
    return () if node.site is not None and node.site.function == "__setitem__" else size_demands("size", node, shapes)


def through(name: str, f: Callable[[Tensor], Tensor], after: int = 8) -> Sample:
    """A function between two convolutions; ``after``: its number of output channels (8 at its input)."""
    return Sample(lambda: chain(nn.Conv2d(3, 8, 3), Apply(f), nn.Conv2d(after, 4, 3, padding=1)), (2, 3, 6, 6), name)


def _view_samples() -> Iterable[Sample]:
    yield through("view and back", lambda x: x.view(x.shape[0], 2, -1, *x.shape[2:]).reshape(x.shape))
    yield through("flatten", lambda x: x.flatten(1).unflatten(1, (x.shape[1], *x.shape[2:])))
    yield through("channel shuffle by hand", _shuffle_by_hand)
    yield Sample(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 3)), (2, 3, 6, 6), "into linear"
    )


def _cast_samples() -> Iterable[Sample]:
    yield through("rounded by a cast", lambda x: x.long().to(x.dtype) + x.bool().to(x))


def _as_samples() -> Iterable[Sample]:
    yield through("view_as", lambda x: x.unsqueeze(1).view_as(x) + x.flatten(1).reshape_as(x))
    yield through("view as a part", lambda x: x.reshape_as(x[:, :, None]).flatten(1, 2))


def _move_samples() -> Iterable[Sample]:
    yield through("permute", lambda x: x.permute(0, 2, 3, 1).flip(1).permute(0, 3, 1, 2))
    yield through("transpose", lambda x: x.transpose(1, 2).swapaxes(1, 2).movedim(1, 0).movedim(0, 1))
    yield through("flip channels", lambda x: x.flip(1))
    yield through("roll positions", lambda x: x.roll(1, 2) + x.roll((1, 2), (2, 3)))
    yield Sample(
        lambda: nn.Sequential(nn.Linear(5, 8), Apply(lambda x: (x.t() * 1).T.mT.t()), nn.Linear(8, 3)),
        (2, 5),
        "transposed matrices",
    )
    yield Sample(
        lambda: nn.Sequential(nn.Linear(5, 8), Apply(lambda x: (x.H * 1).mH.adjoint().H), nn.Linear(8, 3)),
        (2, 5),
        "adjoint matrices",
    )
    yield through("other names", lambda x: x.moveaxis(1, 2).swapdims(1, 2))


def _expand_samples() -> Iterable[Sample]:
    yield through("expand over space", lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4) * x)
    yield through("expand_as", lambda x: x.mean((2, 3), keepdim=True).expand_as(x) + x)
    yield through("expand to a part", lambda x: x.mean((1, 2, 3), keepdim=True).expand_as(x[:, :4]) + x[:, 4:], after=4)
    yield through("broadcast_to", lambda x: x.mean((2, 3), keepdim=True).broadcast_to(x.shape) * x)
    yield through("expand over channels", lambda x: x * x.new_ones(1, 1, 1, 1).expand(1, x.shape[1], 1, 1))


def _shuffle_by_hand(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


_SAME = "alias clone contiguous detach lift_fresh".split()
_CAST = "_to_copy to type_as".split()
_VIEW = "_reshape_alias flatten unsqueeze".split()
_VIEW_AS = "reshape_as view_as".split()
_PERMUTED = """
    adjoint flip mH mT matrix_H moveaxis movedim numpy_T permute swapaxes swapdims t transpose
""".split()

SAME = frozenset([*_SAME, *_CAST])
"""Ops that leave all entries where they are."""

TURNED = frozenset(_PERMUTED) - {"flip"}
"""Ops that permute dimensions and keep the order of entries along each."""

MOVES: Mapping[str, Move] = (
    dict.fromkeys([*_SAME, *_CAST], _same)
    | dict.fromkeys([*_VIEW, *_VIEW_AS, "squeeze", "view", "_unsafe_view", "reshape", "unflatten"], _view)
    | dict.fromkeys([*_PERMUTED, "roll"], _permuted)
    | dict.fromkeys(["expand", "expand_as", "broadcast_to"], expanded)
)

RULES = [
    shape_rule(_SAME, _same),
    replace(shape_rule(_CAST, _same), constants=_cast, samples=_cast_samples),
    shape_rule(_VIEW, _view, view_labels),
    shape_rule(_VIEW_AS, _view, _as_other(view_labels), samples=_as_samples),
    shape_rule(
        ["view", "_unsafe_view"],
        _view,
        view_labels,
        demands=_view_demands,
        samples=_view_samples,
        rare=Rare(preserved=_preserved("size")),
    ),
    shape_rule(
        ["reshape"],
        _view,
        view_labels,
        demands=lambda n, k, s: size_demands("shape", n, s),
        rare=Rare(preserved=_preserved("shape")),
    ),
    shape_rule(
        ["unflatten"],
        _view,
        view_labels,
        demands=lambda n, k, s: size_demands("sizes", n, s, n.args["dim"] % source_of(n).ndim),
        attributes=head_sizes,
    ),
    shape_rule(_PERMUTED, _permuted, samples=_move_samples),
    shape_rule(["roll"], _permuted, _rolled_labels),
    shape_rule(
        ["expand", "broadcast_to"],
        expanded,
        _expand_labels,
        demands=lambda n, k, s: size_demands("size", n, s),
        samples=_expand_samples,
    ),
]
