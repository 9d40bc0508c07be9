"""Losses and gradients keep all channels, and say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from tests.engine.nets import Net

TARGETS = torch.arange(3)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy_loss": lambda y: F.cross_entropy(y, TARGETS),
    "nll_loss_nd": lambda y: F.nll_loss(y, TARGETS),
    "binary_cross_entropy_with_logits": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(3, 4)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_compared_with_targets_stays(name: str) -> None:
    """Features in front of it go."""
    net = Net(lambda m, x: LOSSES[name](m.head(m.stem(x))), stem=nn.Linear(5, 8), head=nn.Linear(8, 4))
    stem, head = engine.dependency_groups(net, torch.randn(3, 5))
    assert stem.reason is None and str(head.reason).startswith(f"{name} (") and "with targets" in str(head.reason)


def test_gradients_that_code_takes() -> None:
    """Their order follows that of the parameters: these stay, and the reason is no op that nobody knows."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 5)

    def step() -> Tensor:
        (gradient,) = torch.autograd.grad(net(x).sum(), [net[0].weight], create_graph=True)
        return gradient.norm()

    graph = engine.trace(net, x, entries={"step": engine.Entry(step, training=True)})
    group = engine.dependency_groups(net, x, graph=graph)[0]
    assert str(group.reason).startswith("its gradient is read by the code (")


def test_calls_of_entries_name_the_entry() -> None:
    """As far as no module makes them."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = engine.trace(net, torch.randn(3, 5), entries={"penalty": lambda: net[0].weight.abs().sum()})
    shown = [repr(node).partition(" (")[0] for node in graph.nodes]
    assert shown == ["linear in '0'", "relu in '1'", "linear in '2'", "abs of 'penalty'", "sum of 'penalty'"]
