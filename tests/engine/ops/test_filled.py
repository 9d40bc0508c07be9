"""Tensors that are made in the forward."""

from __future__ import annotations

import torch
from torch import nn

from engine.ops.samples import Apply
from tests.engine.exactness import channel_masks, check_exact, randomised
from tests.engine.nets import constants_of


def test_what_they_hold_is_known() -> None:
    """One number everywhere, at whatever size."""
    x = torch.zeros(1, 3, 4, 4)
    net = Apply(lambda x: torch.full_like(x, 0.5) + x.new_ones(x.shape), nn.Identity())
    constants = constants_of(net, x)
    assert constants[constants.graph.outputs[0]].unique().tolist() == [1.5]


def test_they_go_with_the_channels_they_meet() -> None:
    """A tensor that is made as wide as the channels is narrower afterwards."""
    gate = Apply(lambda x: x * x.new_full((x.shape[1], 1, 1), 0.25) + torch.zeros_like(x), nn.Identity())
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), gate, nn.Conv2d(8, 4, 1)))
    plan = check_exact(model, channel_masks(model, 0), torch.randn(2, 3, 6, 6).double())
    assert "0.weight" in plan.slices
