"""What a training step leaves with hooks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.verification.leftovers import Leftovers


def test_what_is_kept_and_what_is_not() -> None:
    """A tensor in a list counts; what only the graph held does not."""
    kept: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with Leftovers() as leftovers:
        y = x * 3
        y.register_hook(lambda gradient: kept.append(gradient * 2))
        y.tanh().sum().backward()
    del y
    assert [t.shape for t in leftovers.tensors([x.grad])] == [(2,)]
    kept.clear()
    assert not leftovers.tensors([x.grad])


def test_what_is_read() -> None:
    """A list, a truth value and a number are copies that no reference shows."""
    with Leftovers() as leftovers, leftovers.reading():
        numbers = torch.ones(3).tolist()
        truth = bool(torch.zeros(()))
    assert numbers == [1.0, 1.0, 1.0] and not truth
    assert [t.tolist() for t in leftovers.tensors([])] == [numbers, 0.0]
