"""Copies of callbacks."""

from __future__ import annotations

import types
from collections import deque

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
