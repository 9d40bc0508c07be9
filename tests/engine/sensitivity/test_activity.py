"""Measurements of what contractions read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import TraceError
from engine.sensitivity.activity import ActivityMeter
from tests.engine.nets import Net


def meter(model: nn.Module, x: Tensor) -> ActivityMeter:
    """A meter of all groups."""
    graph = engine.trace(model, x)
    return ActivityMeter(graph, engine.dependency_groups(model, x, graph=graph))


def test_sums_behind_the_activation() -> None:
    """Counts, positives and magnitudes are those of the tensor that the next layer reads, channel by channel."""
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1)).eval()
    x = torch.randn(3, 2, 6, 6)
    found, read = meter(net, x)(net, (x,)), net[:3](x).detach().double()
    assert torch.equal(found.count["0"], torch.full((5,), 48.0, dtype=torch.float64))
    assert torch.equal(found.positive["0"], (read > 0).sum((0, 2, 3)).double())
    torch.testing.assert_close(found.magnitude["0"], read.abs().sum((0, 2, 3)), rtol=1e-6, atol=0)


def test_functional_calls_and_several_readers() -> None:
    """A weight that a function reads counts, and of two readers both."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = torch.relu(net.first(x))
        return nn.functional.linear(x, net.second.weight) + net.third(-x)

    net = Net(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2), third=nn.Linear(4, 2))
    x = torch.randn(5, 3)
    found, read = meter(net, x)(net, (x,)), torch.relu(net.first(x))
    assert torch.equal(found.positive["first"], (read > 0).sum(0).double())
    assert torch.equal(found.count["first"], torch.full((4,), 10.0, dtype=torch.float64))


def test_heads_are_measured_inside_attention() -> None:
    """The heads of `nn.MultiheadAttention` are read by its output projection, which is not a module call of its own."""
    net = Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 5, 8)
    measure = meter(net, x)
    assert measure.measured == {"attention"}
    assert measure(net, (x,)).count["attention"].tolist() == [2 * 5 * 4] * 2


def test_nothing_is_left_behind() -> None:
    """Weights, buffers, modes and the random state are as before, in train mode with dropout and batch norm too."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).train()
    x = torch.randn(5, 3)
    measure = meter(net, x)
    before, random = {n: v.clone() for n, v in net.state_dict().items()}, torch.get_rng_state()
    measure(net, (x,))
    assert torch.equal(torch.get_rng_state(), random) and all(m.training for m in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net(x).sum().backward()  # nothing of inference mode stays


def test_another_path_is_an_error() -> None:
    """A batch that does not reach a layer cannot be measured, and says which."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.last(net.first(x)) if len(x) > 1 else net.first(x)

    net = Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2))
    measure = meter(net, torch.randn(5, 3))
    with pytest.raises(TraceError, match="another path.*'last'"):
        measure(net, (torch.randn(1, 3),))
