"""The batches that weights are fitted on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compensation.batches import inputs_of
from engine.errors import InputError, TraceError


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


def test_batches_that_cannot_be_used_are_named() -> None:
    """As batches, and not as the example; one without entries, and one that the model rejects."""
    net, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3)
    masks = {"0": {"weight": torch.ones(4, 3)}}
    with pytest.raises(InputError, match=r"A batch of shape \(8, 3\) is on the meta device"):
        engine.compensate(net, example, masks, [torch.zeros(8, 3, device="meta")])
    with pytest.raises(TraceError, match=r"Sequential rejected a batch \(\(2, 5\) float32\).*Pass batches that"):
        engine.compensate(net, example, masks, [torch.zeros(8, 5)])
    norm = nn.BatchNorm1d(3)
    with pytest.raises(TraceError, match=r"BatchNorm1d rejected a batch \(\(8, 5\) float32\)"):
        engine.recalibrate_norms(norm, [torch.zeros(8, 5)])
