"""The op that separates a layer's channels from those of its consumers; the exchange is in ``surgery/``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.ops.spread import separate_layers


def test_nothing_is_left_behind() -> None:
    """Separating layers for a trace leaves the module as it was, after an error too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
    before = list(vars(model[0])), type(model[0])
    with pytest.raises(KeyError), separate_layers(model, {"0": 1}):
        assert type(model[0]) is not nn.Conv2d
        raise KeyError
    assert (list(vars(model[0])), type(model[0])) == before


def test_the_channels_of_the_result_are_others() -> None:
    """The layer's own channels and those of its consumer are in different groups."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
    with separate_layers(model, {"0": 1}):
        graph = engine.trace(model, torch.randn(1, 3, 4, 4))
    assert [node.op for node in graph.nodes].count("engine::spread") == 1
