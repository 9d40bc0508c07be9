"""Batch norm statistics, re-estimated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import engine
from engine.errors import EngineError


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 1)).double()


def test_the_statistics_are_those_of_the_batches() -> None:
    """As torch's cumulative average has them; parameters, modes and momenta stay, dropout is off."""
    net, batches = _net().eval(), [torch.randn(16, 3, 6, 6).double() for _ in range(3)]
    weights = copy.deepcopy(dict(net.named_parameters()))
    moved = engine.recalibrate_norms(net, [(batch, torch.zeros(16)) for batch in batches])
    features = [net[0](batch) for batch in batches]
    mean = torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0)
    variance = torch.stack([f.var((0, 2, 3)) for f in features]).mean(0)
    assert torch.allclose(net[1].running_mean, mean) and torch.allclose(net[1].running_var, variance)
    assert not net.training and not net[1].training and net[1].momentum == 0.1 and moved["1"] > 0
    assert all(torch.equal(parameter, weights[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([torch.full((2, 3, 6, 6), torch.nan).double()], "'1' statistics that are not finite"),
        ([torch.randn(2, 5, 6, 6).double()], "rejected"),
    ],
)
def test_after_an_error_the_statistics_are_as_before(batches: list[torch.Tensor], message: str) -> None:
    """No batches, NaN, the wrong shape: said, and nothing changes."""
    net = _net().train()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(EngineError, match=message):
        engine.recalibrate_norms(net, batches)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()) and net.training
