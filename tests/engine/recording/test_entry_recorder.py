"""Runs of entries: what enters from outside varies, and random numbers do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


def values(call: object, *args: Tensor) -> dict[str, list[bool]]:
    """Return, per op of an entry, whether something is known of each tensor that it reads and no node makes."""
    net = nn.Linear(4, 4)
    graph = engine.trace(net, torch.zeros(2, 4), entries={"step": engine.Entry(call, (net, *args))})
    nodes = [node for node in graph.nodes if node.path == "step"]
    return {node.op: [v.data is not None for v in node.inputs if v.producer is None] for node in nodes}


def test_tensors_from_outside_vary() -> None:
    """A tensor that was there before is not a constant; one that is made of numbers in the code is."""
    outside = torch.zeros(4)
    assert values(lambda net: net.weight * outside)["mul"] == [False, False]
    assert values(lambda net: net.weight * (outside + 1))["mul"] == [False]
    assert values(lambda net: net.weight * torch.tensor([1.0, 0.0, 0.0, 1.0]))["mul"] == [False, True]
    assert values(lambda net: net.weight * torch.zeros(4))["mul"] == [False, True]


def test_random_numbers_vary() -> None:
    """They are made of no tensor, and are not constant."""
    assert values(lambda net: net.weight * torch.bernoulli(torch.zeros(4)))["mul"] == [False]
    assert values(lambda net: net.weight + torch.rand(4))["add"] == [False]


def test_parameters_as_arguments_are_themselves() -> None:
    """A parameter that is passed in is the parameter, and no input."""
    net = nn.Linear(4, 4)
    graph = engine.trace(net, torch.zeros(2, 4), entries={"norm": engine.Entry(torch.norm, (net.weight,))})
    assert [value.name for value in graph.nodes[-1].inputs] == ["weight"]
