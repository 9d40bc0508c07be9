"""Modules around a model: which an entry reaches, and that they stay as they were."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.outer_modules import outer_modules

OUTER = nn.BatchNorm1d(4)


def through_a_global(x: Tensor) -> Tensor:
    """Read a module of this file."""
    return OUTER(x)


class Owner(nn.Module):
    """Holds a network beside a norm, and a teacher that it does not register."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.norm = net, nn.BatchNorm1d(4)
        self.hidden = [nn.Linear(4, 4)]
        self.calls = 0

    def step(self, x: Tensor) -> Tensor:
        """Change state that is not a tensor, a buffer, and a weight."""
        self.calls += 1
        with torch.no_grad():
            self.hidden[0].weight.mul_(0.5)
        return self.norm(self.hidden[0](self.net(x)))


def test_what_is_reached() -> None:
    """Owners, closures, defaults, partial functions, globals and lists; nothing of the model itself."""
    net, other = nn.Linear(3, 4), nn.Linear(4, 4)
    owner = Owner(net)
    assert outer_modules(owner.step, net) == [owner, owner.hidden[0]]
    assert outer_modules(lambda x: other(net(x)), net) == [other]
    assert outer_modules(functools.partial(torch.add, other), net) == [other]
    assert outer_modules(through_a_global, net) == [OUTER]
    assert outer_modules((net.forward, (net.weight,)), net) == []


@pytest.mark.parametrize("training", [False, True])
def test_they_stay_as_they_were(training: bool) -> None:
    """Weights, statistics, attributes, modes and random numbers, also where it runs on data."""
    net = nn.Linear(3, 4)
    owner = Owner(net).train()

    def step(x: Tensor) -> Tensor:
        out = owner.step(x)
        return out if float(x.sum()) != 1 else out * 2  # which takes data

    before = {name: t.clone() for name, t in owner.state_dict().items()}
    hidden, state = owner.hidden[0].weight.clone(), torch.get_rng_state()
    graph = engine.trace(
        net, torch.zeros(2, 3), entries={"step": engine.Entry(step, (torch.ones(2, 3),), training=training)}
    )
    assert graph.on_data == {"step"}
    assert all(torch.equal(before[name], t) for name, t in owner.state_dict().items())
    assert torch.equal(hidden, owner.hidden[0].weight) and torch.equal(state, torch.get_rng_state())
    assert owner.calls == 0 and owner.training and owner.norm.training
