"""Hooks that code of a model may remove."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

import engine


class Hooked(nn.Sequential):
    """Has a method that removes a hook."""

    handle: Any = None

    def stop(self) -> None:
        """Remove the hook."""
        self.handle.remove()


def test_channels_around_a_removable_hook_stay() -> None:
    """They do not where there is no hook, or only one of torch's."""
    net, x = Hooked(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3)
    prune.random_unstructured(net[2], "weight", 0.5)
    assert not all(group.reason for group in engine.dependency_groups(net, x))
    net.handle = net[0].register_forward_hook(lambda module, args, out: out.flip(1))
    graph = engine.trace(net, x)
    assert all(group.reason for group in engine.dependency_groups(net, x, graph=graph))
    assert any("around them all channels stay: 0." in note for note in graph.notes)
