"""Ops that read or write entries at an index tensor: embedding, advanced indexing, index_select, index_put."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.shape import through
from engine.program.arrays import align, any_over, support, uniform
from engine.program.graph import Node, Origin, Value
from engine.rule import Rare, Rule, Sample, Shapes, Statistic

__all__ = ["RULES", "Place", "place_of"]


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


_FOR_GRADIENTS = frozenset(["padding_idx", "scale_grad_by_freq", "sparse"])


def _columns(node: Node) -> Iterable[Statistic]:
    return [Statistic(node.output, node.output.ndim - 1)]


def _embedding_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """A zero column produces zeros."""
    zero = constants.zero(node.args["weight"]).all(0)
    return [torch.where(zero, 0.0, math.nan).view([1] * (node.output.ndim - 1) + [-1])]


# ---------------------------------------------------------------- advanced indexing


_MASKS = (torch.bool, torch.uint8)  # dtypes of tensors that select entries by a flag for each


@dataclass(frozen=True)
class Place:
    """Where index tensors point in a tensor, and where their own dimensions are in what they select.

    Attributes:
        dims: dimensions that they index.
        start: first dimension of the result that is theirs; 0 where a slice separates them.
        rank: number of these dimensions: all index tensors are broadcast together.
    """

    dims: tuple[int, ...]
    start: int
    rank: int

    def selected(self, array: Tensor) -> Tensor:
        """Return an array that does not depend on the indexed dimensions as one of the result."""
        kept = [n for d, n in enumerate(array.shape) if d not in self.dims]
        return array.reshape([*kept[: self.start], *[1] * self.rank, *kept[self.start :]])

    def restored(self, array: Tensor) -> Tensor:
        """Return an array of the result that does not depend on the index tensors' dimensions as one of the source."""
        shape = [n for d, n in enumerate(array.shape) if d not in self.own]
        for dim in self.dims:
            shape.insert(dim, 1)
        return array.reshape(shape)

    @property
    def own(self) -> range:
        """The index tensors' dimensions in the result."""
        return range(self.start, self.start + self.rank)

    @classmethod
    def of(cls, indices: Sequence[Value | None]) -> Place | None:
        """Return the place of some index tensors, or of one mask; None where masks and other tensors are mixed."""
        dim, dims, masks = 0, list[int](), list[Value]()
        for index in indices:
            is_mask = index is not None and index.dtype in _MASKS
            taken = index.ndim if index is not None and is_mask else 1
            dims += range(dim, dim + taken) if index is not None else ()
            masks += [index] if index is not None and is_mask else []
            dim += taken
        tensors = [index for index in indices if index is not None]
        if masks and len(tensors) > 1 or not dims:
            return None
        joined = dims[-1] - dims[0] == len(dims) - 1
        rank = 1 if masks else max(index.ndim for index in tensors)
        return cls(tuple(dims), dims[0] if joined else 0, rank)


def place_of(node: Node | Origin) -> Place | None:
    """Return where index tensors select entries; None for masks, which select as many as the data says."""
    if node.op == "index_select":
        dim = node.args["dim"] % node.inputs[0].ndim
        return Place((dim,), dim, 1)
    indices = node.args["indices"]
    is_masked = any(index is not None and index.dtype in _MASKS for index in indices)
    return None if is_masked else Place.of(indices)


def _hold_indices(node: Node, labels: Labels) -> None:
    """Freeze the slots of index tensors: the result has their sizes."""
    for index in node.inputs:
        if not index.dtype.is_floating_point and not index.stored and index is not node.inputs[0]:
            labels.freeze(index, f"{node!r} indexes with it")


def _index_labels(node: Node, labels: Labels) -> None:
    """Freeze the indexed dimensions, since the index cannot change; propagate all others."""
    source, place = node.inputs[0], place_of(node)
    labels.claim(source)
    _hold_indices(node, labels)
    if place is None:
        labels.freeze(source, f"{node!r} picks from it")
        return
    for layer in labels.without(source, place.dims, f"{node!r} picks from it"):
        labels.add(node.output, place.selected(layer))


def _index_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    place, array = place_of(node), constants.plain(node.inputs[0])
    if place is None:
        return None
    if any(array.size(dim) > 1 for dim in place.dims):  # zero along all of these dimensions is zero at any index
        zero = (array == 0).all(tuple(place.dims), keepdim=True)
        array = torch.where(zero, 0.0, math.nan)
    return [place.selected(array)]


def _index_used(node: Node, use: Use) -> None:
    place, source = place_of(node), node.inputs[0]
    for index in node.inputs[1:]:
        use.add_all(index)
    if place is None:
        use.add_all(source)
        return
    use.add(source, place.restored(any_over(use[node.output], place.own)))


# ---------------------------------------------------------------- writing at an index


def _written_to(node: Node) -> Place | None:
    """Return where a write goes; None where masks and other tensors are mixed."""
    return Place.of(node.args["indices"])


def _lead(node: Node, place: Place) -> int:
    """Return how many dimensions of the selected entries the written values lack."""
    rank: int = node.args["self"].ndim - len(place.dims) + place.rank
    return rank - node.args["values"].ndim


def _own_dims(node: Node, place: Place) -> list[int]:
    """Return the dimensions of the written values that the index tensors cover."""
    lead = _lead(node, place)
    return [d - lead for d in place.own if d >= lead]


def _to_base(node: Node, place: Place, array: Tensor) -> Tensor:
    """Bring an array of the values that does not depend on the index to the rank of the base."""
    return place.restored(align(array, array.ndim + _lead(node, place)))


def _put_labels(node: Node, labels: Labels) -> None:
    """Freeze indexed dimensions; along all others, tie the written values to the base."""
    base, values, place = node.args["self"], node.args["values"], _written_to(node)
    for index in node.args["indices"]:
        if index is not None and not index.stored:
            labels.freeze(index, f"{node!r} writes where it says")
    if place is None:
        for value in (base, values):
            labels.freeze(value, f"{node!r} writes where masks and numbers say")
        return
    theirs = _own_dims(node, place)
    labels.claim(base)
    labels.claim(values)
    layers = labels.without(base, place.dims, f"{node!r} writes at an index of it")
    written = labels.without(values, theirs, f"{node!r} writes at an index of it")
    written = [_to_base(node, place, layer) for layer in written]
    sizes = _to_base(node, place, torch.empty([1 if d in theirs else n for d, n in enumerate(values.shape)])).shape
    for mine, other, have in ((layers, written, sizes), (written, layers, base.shape)):
        slotted_dims = {d for layer in other for d in support(layer)}
        for layer in mine:
            if any(have[d] > 1 and d not in slotted_dims for d in support(layer)):
                labels.slots.freeze(layer, f"{node!r} combines it with a tensor of fixed size")
            else:  # positions created by `torch.zeros` stay out of a later flatten
                labels.add(node.output, layer)


def _put_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """Constant where old and new values agree; over zeros, the written values times a map of the positions."""
    base, values, place = node.args["self"], node.args["values"], _written_to(node)
    if place is None or node.args["accumulate"]:
        return None
    old = uniform(constants[base], place.dims)
    new = _to_base(node, place, uniform(constants[values], _own_dims(node, place)))
    empty = bool((old == 0).all())
    if empty or constants.has_profile(base) or constants.has_profile(values):
        constants.mark_profile(node.output)
    return [new if empty else torch.where(old == new, old, math.nan)]


def _put_used(node: Node, use: Use) -> None:
    base, values, place = node.args["self"], node.args["values"], _written_to(node)
    for value in node.inputs:
        if place is None or value not in (base, values):
            use.add_all(value)
    if place is not None:
        used = use[node.output]
        use.add(base, used)
        use.add(values, place.selected(any_over(used, place.dims)))


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
        labels.hold(node.output, fixed, f"{node!r} combines it with a tensor of fixed size")


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
    Rule(
        ("embedding",),
        _embedding_labels,
        _embedding_constants,
        rare=Rare(produces=_columns, for_gradients=_FOR_GRADIENTS),
        samples=_samples,
    ),
    Rule(("index", "index_select"), _index_labels, _index_constants, _index_used),
    Rule(("index_add",), _added_labels, _added_constants, _added_used, _added_macs, samples=_added_samples),
    Rule(("index_put",), _put_labels, _put_constants, _put_used, samples=_put_samples),
]
