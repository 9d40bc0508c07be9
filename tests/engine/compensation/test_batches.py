"""The batches that weights are fitted on."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.compensation.batches import inputs_of


def test_no_more_samples_than_wanted_in_the_dtype_of_the_example() -> None:
    """The last batch is cut, and batches behind it are not drawn."""
    graph = engine.trace(nn.Linear(3, 2).double(), torch.zeros(1, 3).double())
    drawn = []

    def batches() -> object:
        for number in range(9):
            drawn.append(number)
            yield torch.ones(4, 3), torch.zeros(4)

    inputs = inputs_of(batches(), graph, samples=6)  # type: ignore[arg-type]
    assert [tuple(t.shape) for [t] in inputs] == [(4, 3), (2, 3)] and drawn == [0, 1]
    assert all(t.dtype is torch.float64 for [t] in inputs)
