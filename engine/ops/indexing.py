"""Ops that pick entries by an index tensor: embedding, advanced indexing, index_select, gather."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.constants import Constants
from engine.constraints import NonEmpty
from engine.graph import Node
from engine.propagate import Labels
from engine.rule import Rule, Sample
from engine.use import Use

__all__ = ["RULES"]


# ---------------------------------------------------------------- embedding


def _embedding_labels(node: Node, labels: Labels) -> None:
    """The table's rows are picked by the data and stay; its columns are channels."""
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


def _embedding_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """A column that is zero gives zero."""
    zero = constants.zero(node.args["weight"]).expand(node.args["weight"].shape).all(0)
    return [torch.where(zero, 0.0, math.nan).view([1] * (node.output.ndim - 1) + [-1])]


# ---------------------------------------------------------------- advanced indexing


def _picked(node: Node) -> tuple[int, int] | None:
    """(dimension, rank of the index) where one index tensor is given; None for several."""
    if node.op in ("index_select", "gather"):
        rank = 1 if node.op == "index_select" else node.inputs[0].ndim
        return node.args["dim"] % node.inputs[0].ndim, rank
    given = [(d, i) for d, i in enumerate(node.args["indices"]) if i is not None]
    return (given[0][0], given[0][1].ndim) if len(given) == 1 and given[0][1].dtype != torch.bool else None


def _moved(node: Node, array: Tensor, dim: int, rank: int) -> Tensor:
    """What a layer that does not depend on the picked dimension looks like behind it."""
    if node.op == "gather":
        return array
    shape = list(array.shape)
    return array.reshape([*shape[:dim], *[1] * rank, *shape[dim + 1 :]])


def _index_labels(node: Node, labels: Labels) -> None:
    """Entries along the picked dimension are chosen by an index that cannot change; other dimensions pass."""
    source, place = node.inputs[0], _picked(node)
    labels.claim(source)
    if place is None or node.op == "gather":
        labels.freeze(source, f"{node!r} picks from it")
        return
    for layer in labels.without(source, [place[0]], f"{node!r} picks from it"):
        labels.add(node.output, _moved(node, layer, *place))


def _index_constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    place, known = _picked(node), constants.plain(node.inputs[0])
    if place is None or node.op == "gather":
        return None
    if known.size(place[0]) > 1:  # whichever is picked, what is zero in all of them is zero
        known = torch.where((known == 0).all(place[0], keepdim=True), 0.0, math.nan)
    return [_moved(node, known, *place)]


def _index_used(node: Node, use: Use) -> None:
    place, source = _picked(node), node.inputs[0]
    if place is None or node.op == "gather":
        use.add_all(source)
        return
    dim, rank = place
    used = use[node.output]
    for d in range(dim, dim + rank):
        used = used.any(d, keepdim=True)
    shape = list(used.shape)
    use.add(source, used.reshape([*shape[:dim], 1, *shape[dim + rank :]]))


# ---------------------------------------------------------------- samples


class _Words(nn.Module):
    """Numbers turned into indices, looked up in a table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long() % 7
        found: Tensor = self.head(torch.tanh(self.inner(F.gelu(self.table(words)))))
        return found


class _Biased(nn.Module):
    """A table of biases per channel, looked up by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.biases = nn.Parameter(torch.randn(9, 6))
        self.register_buffer("places", torch.tensor([3, 1, 1, 8]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(x) + self.biases[self.get_buffer("places")])
        return found


def _samples() -> Iterable[Sample]:
    yield Sample(lambda: _Words(tied=False), (2, 4), "embedding")
    yield Sample(lambda: _Words(tied=True), (2, 4), "embedding tied to the head")
    yield Sample(_Biased, (2, 4, 5), "table of biases")


RULES = [
    # `embedding_dim` keeps the old number: models scale by its root, and that factor has to stay
    Rule(("embedding",), _embedding_labels, _embedding_constants, samples=_samples),
    Rule(("gather", "index", "index_select"), _index_labels, _index_constants, _index_used),
]
