"""Ops that read or write entries at an index tensor: embedding, advanced indexing, index_select, index_put."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import through
from engine.program.arrays import align, support, uniform
from engine.program.graph import Node, Origin
from engine.rule import Rare, Rule, Sample, Shapes, Statistic

__all__ = ["RULES", "picked"]


# ---------------------------------------------------------------- embedding


def _embedding_labels(node: Node, labels: Labels) -> None:
    """Freeze the table's rows, which the data selects; its columns are channels."""
    table = node.args["weight"]
    if not table.stored:
        labels.freeze(table, f"the table of {node!r} is computed")
        return
    labels.fix(table, 0)
    columns = labels.along(table, 1)
    if columns is None:
        columns = labels.slots.new(table.shape[1])
        labels.add(table, columns[None])
    labels.born.append(columns)
    labels.constraints.append(NonEmpty(columns))
    labels.add(node.output, columns.view([1] * (node.output.ndim - 1) + [-1]))


def _columns(node: Node) -> Iterable[Statistic]:
    return [Statistic(node.output, node.output.ndim - 1)]


def _embedding_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """A zero column produces zeros."""
    zero = constants.zero(node.args["weight"]).all(0)
    return [torch.where(zero, 0.0, math.nan).view([1] * (node.output.ndim - 1) + [-1])]


# ---------------------------------------------------------------- advanced indexing


def picked(node: Node | Origin) -> tuple[int, int] | None:
    """(dimension, rank of the index) for a single index tensor; None for several."""
    if node.op == "index_select":
        return node.args["dim"] % node.inputs[0].ndim, 1
    indices = [(d, i) for d, i in enumerate(node.args["indices"]) if i is not None]
    return (indices[0][0], indices[0][1].ndim) if len(indices) == 1 and indices[0][1].dtype != torch.bool else None


def _moved(node: Node, array: Tensor, dim: int, rank: int) -> Tensor:
    """Reshape a label array that does not depend on the indexed dimension to the rank of the output."""
    shape = list(array.shape)
    return array.reshape([*shape[:dim], *[1] * rank, *shape[dim + 1 :]])


def _index_labels(node: Node, labels: Labels) -> None:
    """Freeze the indexed dimension, since the index cannot change; propagate all others."""
    source, place = node.inputs[0], picked(node)
    labels.claim(source)
    if place is None:
        labels.freeze(source, f"{node!r} picks from it")
        return
    for layer in labels.without(source, [place[0]], f"{node!r} picks from it"):
        labels.add(node.output, _moved(node, layer, *place))


def _index_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    place, array = picked(node), constants.plain(node.inputs[0])
    if place is None:
        return None
    if array.size(place[0]) > 1:  # zero along the whole dimension is zero at any index
        array = torch.where((array == 0).all(place[0], keepdim=True), 0.0, math.nan)
    return [_moved(node, array, *place)]


def _index_used(node: Node, use: Use) -> None:
    place, source = picked(node), node.inputs[0]
    for index in node.inputs[1:]:
        use.add_all(index)
    if place is None:
        use.add_all(source)
        return
    dim, rank = place
    used = use[node.output]
    for d in range(dim, dim + rank):
        used = used.any(d, keepdim=True)
    shape = list(used.shape)
    use.add(source, used.reshape([*shape[:dim], 1, *shape[dim + rank :]]))


# ---------------------------------------------------------------- writing at an index


def _target(node: Node) -> tuple[int, int, int] | None:
    """(first dimension, number of indexed dimensions, rank of the index) for one index tensor; None for several."""
    dim, places = 0, []
    for index in node.args["indices"]:
        taken = index.ndim if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            places.append((dim, taken, 1 if index.dtype == torch.bool else index.ndim))
        dim += taken
    return places[0] if len(places) == 1 else None


def _span(node: Node, place: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """The dimensions of the base, and of the values, that the index covers."""
    start, taken, rank = place
    missing = node.args["self"].ndim - taken + rank - node.args["values"].ndim
    return list(range(start, start + taken)), [d - missing for d in range(start, start + rank) if d >= missing]


def _to_base(node: Node, place: tuple[int, int, int], array: Tensor) -> Tensor:
    """Bring an array of the values that does not depend on the index to the rank of the base."""
    start, taken, rank = place
    shape = list(align(array, node.args["self"].ndim - taken + rank).shape)
    return array.reshape([*shape[:start], *[1] * taken, *shape[start + rank :]])


def _to_values(node: Node, place: tuple[int, int, int], array: Tensor) -> Tensor:
    start, taken, rank = place
    shape = list(array.shape)
    return array.reshape([*shape[:start], *[1] * rank, *shape[start + taken :]])


def _put_labels(node: Node, labels: Labels) -> None:
    """Freeze indexed dimensions; along all others, tie the written values to the base."""
    base, values, place = node.args["self"], node.args["values"], _target(node)
    if place is None:
        for value in (base, values):
            labels.freeze(value, f"{node!r} writes at several indices")
        return
    ours, theirs = _span(node, place)
    labels.claim(base)
    labels.claim(values)
    layers = labels.without(base, ours, f"{node!r} writes at an index of it")
    written = labels.without(values, theirs, f"{node!r} writes at an index of it")
    written = [_to_base(node, place, layer) for layer in written]
    sizes = _to_base(node, place, torch.empty([1 if d in theirs else n for d, n in enumerate(values.shape)])).shape
    for mine, other, have in ((layers, written, sizes), (written, layers, base.shape)):
        slotted_dims = {d for layer in other for d in support(layer)}
        for layer in mine:
            if any(have[d] > 1 and d not in slotted_dims for d in support(layer)):
                labels.slots.freeze(layer, f"{node!r} combines it with what has a fixed size")
            else:  # positions created by `torch.zeros` stay out of a later flatten
                labels.add(node.output, layer)


def _put_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Constant where old and new values agree; over zeros, the written values times a map of the positions."""
    base, values, place = node.args["self"], node.args["values"], _target(node)
    if place is None or node.args["accumulate"]:
        return None
    ours, theirs = _span(node, place)
    old, new = uniform(constants[base], ours), _to_base(node, place, uniform(constants[values], theirs))
    empty = bool((old == 0).all())
    if empty or constants.has_profile(base) or constants.has_profile(values):
        constants.mark_profile(node.output)
    return [new if empty else torch.where(old == new, old, math.nan)]


def _put_used(node: Node, use: Use) -> None:
    base, values, place = node.args["self"], node.args["values"], _target(node)
    for value in node.inputs:
        if place is None or value not in (base, values):
            use.add_all(value)
    if place is not None:
        used = use[node.output]
        use.add(base, used)
        for dim in _span(node, place)[0]:
            used = used.any(dim, keepdim=True)
        use.add(values, _to_values(node, place, used))


# ---------------------------------------------------------------- adding at an index


def _added_labels(node: Node, labels: Labels) -> None:
    """Tie all dimensions of both tensors except the indexed one, which is frozen."""
    base, source = node.args["self"], node.args["source"]
    dim, reason = node.args["dim"] % base.ndim, f"{node!r} adds at an index of it"
    for value in (base, source):
        labels.claim(value)
        for layer in labels.without(value, [dim], reason):
            labels.add(node.output, layer)
    for one, other in ((base, source), (source, base)):
        have = {d for layer in labels.layers(other) for d in support(layer)}
        fixed = {d for d in range(one.ndim) if d != dim and one.shape[d] > 1 and d not in have}
        labels.hold(node.output, fixed, f"{node!r} combines it with what has a fixed size")


def _added_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """The base, where zeros are added to it."""
    base, source = node.args["self"], node.args["source"]
    added = (constants.plain(source) == 0).all(node.args["dim"], keepdim=True)
    return [torch.where(added, constants.plain(base), math.nan)]


def _added_used(node: Node, use: Use) -> None:
    use.add(node.args["self"], use[node.output])
    use.add(node.args["source"], use[node.output].any(node.args["dim"], keepdim=True))
    use.add_all(node.args["index"])


def _added_macs(node: Node, shapes: Shapes) -> int:
    return math.prod(shapes(node.args["source"])) if node.args["alpha"] != 1 else 0


# ---------------------------------------------------------------- samples


class _Words(nn.Module):
    """Numbers turned into indices and looked up in a table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long() % 7
        output: Tensor = self.head(torch.tanh(self.inner(F.gelu(self.table(words)))))
        return output


class _Biased(nn.Module):
    """A table of biases per channel, looked up by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.biases = nn.Parameter(torch.randn(9, 6))
        self.register_buffer("places", torch.tensor([3, 1, 1, 8]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.inner(x) + self.biases[self.get_buffer("places")])
        return output


def _put_samples() -> Iterable[Sample]:
    def rows(x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], x.shape[1], *x.shape[2:], dtype=x.dtype)
        kept = torch.tensor([1, 0])
        out[kept] = x[kept]
        return out

    def places(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :, torch.tensor([0, 2])] = x[:, :, torch.tensor([0, 2])]
        return out

    yield through("rows written at an index", rows)
    yield through("positions written at an index", places)


def _added_samples() -> Iterable[Sample]:
    def rows(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, torch.tensor([1, 1]), torch.tanh(x[:2])) + x

    def places(x: Tensor) -> Tensor:
        return x.index_add(2, torch.tensor([0, 2, 2]), x[:, :, :3].sigmoid(), alpha=2)

    yield through("rows added at an index", rows)
    yield through("positions added at an index", places)


def _samples() -> Iterable[Sample]:
    yield Sample(lambda: _Words(tied=False), (2, 4), "embedding")
    yield Sample(lambda: _Words(tied=True), (2, 4), "embedding tied to the head")
    yield through("index_select", lambda x: x.index_select(2, torch.tensor([0, 2, 2])))
    yield through(
        "a table of positions", lambda x: x + x[:, :, torch.tensor([[3, 1], [0, 0]])].mean((2, 3))[:, :, None]
    )
    yield Sample(_Biased, (2, 4, 5), "table of biases")


RULES = [
    # `embedding_dim` keeps the old number: models scale by its square root, and that factor must not change
    Rule(("embedding",), _embedding_labels, _embedding_constants, rare=Rare(produces=_columns), samples=_samples),
    Rule(("index", "index_select"), _index_labels, _index_constants, _index_used),
    Rule(("index_add",), _added_labels, _added_constants, _added_used, _added_macs, samples=_added_samples),
    Rule(("index_put",), _put_labels, _put_constants, _put_used, samples=_put_samples),
]
