"""Copies of callbacks."""

from __future__ import annotations

import types
from collections import deque

import torch
from torch import nn

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
