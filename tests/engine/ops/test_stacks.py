"""Weights that are read by way of a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.ops.stacks import Matrix, indices_of, matrix_of

Read = Callable[[Tensor, Tensor], Tensor]

READS: dict[str, tuple[Read, tuple[int | None, ...] | None]] = {
    "itself": (lambda w, i: w, (0, 1, 2)),
    "turned": (lambda w, i: w.transpose(-2, -1).contiguous(), (0, 2, 1)),
    "permuted": (lambda w, i: w.permute(2, 0, 1), (2, 0, 1)),
    "selected": (lambda w, i: w[1].t(), (2, 1)),
    "one of each": (lambda w, i: w.unbind(0)[1].float(), (1, 2)),
    "picked": (lambda w, i: w[i].mT, (None, 2, 1)),
    "picked by name": (lambda w, i: w.index_select(0, i), (None, 1, 2)),
    "flipped": (lambda w, i: w.flip(1), None),
    "cut": (lambda w, i: w[:, :2], None),
    "scaled": (lambda w, i: w * 2, None),
}


@pytest.mark.parametrize("name", READS)
def test_where_dimensions_come_from(name: str) -> None:
    """Dimensions of the stored value, None for those of an index; what computes is not a matrix that is stored."""
    read, dims = READS[name]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return read(self.weight, x.long()).sum() + x

    graph = engine.trace(Reader(), torch.zeros(3))
    value = next(node for node in graph.nodes if node.op == "sum").inputs[0]
    found = matrix_of(value)
    assert (None if found is None else found.dims) == dims
    assert found is None or found.weight is graph.stored["weight"] and found.stacked == 1
    assert [v.dtype for v in indices_of(value)] == [torch.int64] * ("picked" in name)
    summed = next(node for node in graph.nodes if node.op == "sum")
    assert summed not in graph.readers(graph.stored["weight"])  # it is made of the weight alone, too
    assert [node.op for node in graph.readers(graph.stored["weight"])] == ["add"]


def test_rows_that_come_first() -> None:
    """As they are stored, turned, or none of both."""
    graph = engine.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    weight = graph.stored["weight"]
    assert [Matrix(weight, dims).first for dims in ((0, 1), (1, 0), (None, 1))] == [True, False, None]
