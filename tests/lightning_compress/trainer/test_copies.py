"""Copies of callbacks."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch
from torch import nn

import engine
from lightning_compress.trainer.copies import copied


def test_what_a_copy_notes_stays_its_own() -> None:
    """In containers within containers, and in tensors; modules are those of the original."""
    average, net = torch.zeros(2), nn.Linear(1, 1)
    one = types.SimpleNamespace(seen={"epochs": [1]}, last=deque([1], maxlen=2), average=(average,), net=net)
    other = copied(one)
    other.seen["epochs"].append(2)
    other.last.append(2)
    other.average[0].add_(1)
    other.name = "new"
    assert vars(one) == {"seen": {"epochs": [1]}, "last": deque([1]), "average": (average,), "net": net}
    assert not average.any() and other.last.maxlen == 2 and other.net is net


class Patience:
    """What a callback counts."""

    def __init__(self) -> None:
        self.wait, self.seen = 0, [0]
        self.owner: Any = None


class Stopping:
    """A callback that counts in an object."""

    def __init__(self) -> None:
        self.state = self.same = Patience()
        self.state.owner = self
        self.foreign = types.SimpleNamespace(wait=0)


def test_objects_of_the_same_package_are_copied() -> None:
    """Once each, with references to one another; those of other packages, which may be anything, are shared."""
    one = Stopping()
    other = copied(one)
    other.state.wait += 1
    other.state.seen.append(1)
    assert (one.state.wait, one.state.seen) == (0, [0])
    assert other.state is other.same and other.state.owner is other and other.foreign is one.foreign


def test_what_no_hook_reads_is_no_part_of_a_recording() -> None:
    """A callback that keeps the weights of each step would make each recording longer than the last."""
    net, kept = nn.Linear(2, 2), types.SimpleNamespace(weights=[torch.ones(2) for _ in range(3)])
    read: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        copy = copied(kept)
        return torch.stack([net(x).sum(), *(copy.weights[place].sum() for place in read)])

    ops = {}
    for number in range(2):
        read[:] = range(number)
        graph = engine.trace(net, torch.ones(1, 2), entries={"step": engine.Entry(step, (torch.ones(1, 2),))})
        ops[number] = [node.op for node in graph.nodes if node.path == "step"]
    assert ops == {0: ["linear", "sum", "stack"], 1: ["linear", "sum", "sum", "stack"]}
