"""A smaller network in one call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import engine
from lightning_compress import prune
from lightning_compress.packages import MisconfigurationException
from tests.engine.exactness import randomised, run


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))
    return randomised(nn.Sequential(*layers))


EXAMPLE = torch.zeros(2, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize(("target", "place"), [("macs", 0), ("params", 1)])
def test_the_target_is_met_and_the_model_stays(target: str, place: int) -> None:
    """The copy costs what was asked for at most, and nearly as much; weights, mode and example are as before."""
    net = _net().train()
    before = copy.deepcopy(net.state_dict())
    small = prune(net, EXAMPLE, 0.4, target=target)
    dense, left = (engine.count_flops_params(m, EXAMPLE, verbose=False)[place] for m in (net, small))
    assert 0.5 * dense < left <= 0.6 * dense
    assert small.certificate.verified and not small.plan.is_empty and not small.report and small.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_data_bring_the_small_network_closer_to_the_dense_one() -> None:
    """On inputs that nothing was fitted on."""
    net = _net()
    data = [torch.randn(64, 3, 8, 8, dtype=torch.float64) for _ in range(4)]
    fresh = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    dense = run(net, fresh)[0]
    plain, fitted = prune(net, EXAMPLE, 0.5), prune(net, EXAMPLE, 0.5, data=data)
    before, after = (float((run(small, fresh)[0] - dense).square().sum()) for small in (plain, fitted))
    assert after < 0.7 * before
    assert all(row.after <= row.before for row in fitted.report.values()) and fitted.report


def test_channels_by_pattern() -> None:
    """As `ChannelPruning` takes them."""
    small = prune(_net(), EXAMPLE, {"0": 0.25}, target="channels", scope="group")
    assert [small[i].out_channels for i in (0, 3, 5)] == [12, 16, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "taylor"}, "gathers statistics"),
        ({"amount": 1.5}, "fraction"),
        ({"target": "speed"}, "`target` is one of"),
        ({"amount": 0.999}, "cannot be reached"),
        ({"layers": "nothing.*"}, "matches no layer"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, object], message: str) -> None:
    """Each is refused by name, before anything runs."""
    with pytest.raises(MisconfigurationException, match=message):
        prune(_net(), EXAMPLE, **options)
