"""What is written into parameters is taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.running.tensor_backup import TensorBackup


def test_views_of_the_same_memory() -> None:
    """Whatever a write goes through, all that shares its memory is kept, as it was before the first one."""
    whole = torch.arange(6.0)
    stored = {"whole": whole, "half": whole[:3], "other": torch.ones(2)}
    kept = TensorBackup(stored)
    kept.keep([whole.view(2, 3)[1], None])
    whole[4] = 9
    kept.keep([whole])
    whole[:] = 7
    stored["other"][0] = 5  # nobody said so
    kept.restore()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and stored["other"].tolist() == [5, 1]


def test_nothing_written() -> None:
    """Nothing is kept, and nothing comes back."""
    weight = torch.ones(2)
    kept = TensorBackup({"weight": weight})
    kept.keep([torch.zeros(3)])
    weight[0] = 2
    kept.restore()
    assert weight.tolist() == [2, 1]


def test_sparse_buffers() -> None:
    """They have no piece of memory to be told apart by, and are no obstacle to a model that data decide about."""

    class Graph(nn.Module):
        """Doubles in place."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            """Return class scores."""
            return self.last(self.first(x).mul_(2).relu()) if x.sum().item() < 1e9 else x

    assert engine.trace(Graph(), torch.randn(2, 5)).decided
