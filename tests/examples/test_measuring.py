"""The measurements behind the table of the example."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import measuring


def test_latencies_take_turns() -> None:
    """The networks are timed alternately, one untimed run each first."""
    order: list[str] = []

    def net(name: str) -> nn.Module:
        module = nn.Identity()
        module.register_forward_hook(lambda *_: order.append(name))
        return module

    result = measuring.latencies({"a": net("a"), "b": net("b")}, torch.zeros(1), rounds=3)
    assert order == ["a", "b"] * 4
    assert set(result) == {"a", "b"} and all(value > 0 for value in result.values())


def test_count_correct() -> None:
    """Correct answers are counted in eval mode, over batches of any size."""
    images = torch.eye(3).repeat(200, 1)
    labels = images.argmax(1)
    labels[:7] = (labels[:7] + 1) % 3
    net = nn.Sequential(nn.Dropout(0.9), nn.Identity())
    assert measuring.count_correct(net, TensorDataset(images, labels)) == 593


def test_relative_difference() -> None:
    """The largest deviation counts, relative to the largest output."""
    images = torch.tensor([[1.0, -4.0], [2.0, 0.5]])
    shift = nn.Linear(2, 2)
    shift.load_state_dict({"weight": torch.eye(2), "bias": torch.tensor([0.0, -1.0])})
    assert measuring.relative_difference(nn.Identity(), shift, images) == 0.25
    assert measuring.relative_difference(shift, shift, images) == 0.0


def test_measure_gives_one_row_each() -> None:
    """A row holds the network's own MACs and parameters, and a size that grows with them."""
    nets = {"small": nn.Sequential(nn.Linear(4, 8, bias=False)), "large": nn.Sequential(nn.Linear(4, 4000, bias=False))}
    small, large = measuring.measure(nets, TensorDataset(torch.rand(5, 4), torch.zeros(5)), rounds=1)
    assert (small.name, small.macs, small.params) == ("small", 32, 32)
    assert (large.macs, large.params) == (16000, 16000)
    assert large.size - small.size >= 4 * (16000 - 32)
    assert small.latency.keys() == {1, 64}


def test_measuring_leaves_the_mode_as_it_is() -> None:
    """Of each module: Lightning goes on training in the mode that it finds."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    net[1].eval()
    with measuring.evaluating(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == [True, True, False]
