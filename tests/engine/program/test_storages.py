"""Which tensors share memory."""

from __future__ import annotations

import torch
from torch import nn

from engine.program.storages import storage_of


def test_views_share_and_copies_do_not() -> None:
    """A parameter is the memory of its data; `detach` and slices are views."""
    weight = nn.Parameter(torch.zeros(4, 3))
    assert {storage_of(t) for t in (weight.data, weight.detach(), weight[1:], weight.t())} == {storage_of(weight)}
    assert storage_of(weight.clone()) != storage_of(weight)


def test_a_sparse_tensor_stands_for_itself() -> None:
    """It has no single memory."""
    first, second = (torch.eye(3).to_sparse() for _ in range(2))
    assert storage_of(first) == storage_of(first) != storage_of(second)
