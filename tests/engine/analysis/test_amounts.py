"""Tests of the numbers that follow a size which is not a channel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.analysis.amounts import Amounts, agreed, amounts_of, follows_size, none_known, other_amounts
from engine.program.expressions import Apply, AttributeOf, ShapeOf
from engine.program.graph import Node, Value
from engine.removal.structure import structure_of

X = Value(0, (2, 8, 6, 6), torch.float32)
WEIGHT = Value(1, (8, 3), torch.float32, name="weight")


def _second(value: Value, dim: int) -> bool:
    return dim == 1


@pytest.mark.parametrize(
    ("expr", "follows"),
    [
        (ShapeOf(X, 2), True),
        (ShapeOf(X, 0), True),
        (ShapeOf(X, 1), False),
        (ShapeOf(WEIGHT, 0), False),
        (AttributeOf("", "stride"), False),
        (Apply("*", ShapeOf(X, 1), Apply("neg", ShapeOf(X, 3), 0)), True),
    ],
)
def test_a_number_follows_sizes_that_are_no_channels(expr: object, follows: bool) -> None:
    """Parameters, attributes and channels are the same for every input."""
    assert follows_size(expr, _second) is follows  # type: ignore[arg-type]


def _node(**args: object) -> Node:
    return Node(3, "op", None, args, {("pad", 1): ShapeOf(X, 2), ("end", 0): ShapeOf(X, 1)}, (), (), "")


def test_amounts_of_a_node() -> None:
    """Only the places whose numbers follow a size; what other runs said is added."""
    assert amounts_of(_node(), _second) == {("pad", 1)}


def test_other_amounts_keep_all_other_numbers() -> None:
    """Numbers at the places become larger, then smaller; booleans and nested lists are counted as they are."""
    node = _node(pad=[0, [True, 3]], end=4, scale=0.5)
    others = [other.args for other in other_amounts(node, [("pad", 1), ("scale", 0)])]
    assert [other["pad"] for other in others] == [[0, [True, 4]], [0, [True, 1]]]
    assert [other["end"] for other in others] == [4, 4]
    assert all(other["scale"] != 0.5 for other in others)


def test_what_differs_varies() -> None:
    """Arrays of different lengths agree only where all entries are one number."""
    zeros, steps = torch.zeros(1, 3).double(), torch.tensor([[0.0, 0.0, 1.0]]).double()
    assert agreed([zeros], [torch.zeros(1, 4).double()])[0].tolist() == [[0, 0, 0]]
    assert agreed([steps], [torch.zeros(1, 4).double()])[0].nan_to_num(9).tolist() == [[0, 0, 9]]
    assert none_known(agreed([zeros], None))
    assert not none_known([zeros, torch.full((1,), math.nan)])


def test_a_pad_of_nothing_makes_a_border() -> None:
    """The constant that arrives at the head has a border, as the padding is nothing at this size only."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            result: Tensor = self.head(F.pad(x, (0, -x.shape[-1] % 4)))
            return result

    graph = engine.trace(Padded(), torch.zeros(1, 3, 8, 8))
    amounts: Amounts = structure_of(graph).amounts
    [pad] = [node for node in graph.nodes if node.op == "pad"]
    assert amounts.at(pad) == {("pad", 1)}
    assert amounts.is_channel(pad.inputs[0], 1) and not amounts.is_channel(pad.inputs[0], 2)
