"""Tests of the runs at other sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.entry_recorder import EntryRecorder, TooLargeError


class Sizes(nn.Module):
    """Runs a further layer for long inputs; in train mode another one for odd batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.long, self.odd = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run layers by the sizes of the input."""
        x = self.stem(x)
        if x.shape[1] > 20:
            x = self.long(x)
        if self.training and x.shape[0] % 2:
            x = self.odd(x)
        return x


def test_layers_at_other_sizes_are_recorded() -> None:
    """In eval mode, and in train mode where only that asks."""
    graph = engine.trace(Sizes(), torch.zeros(2, 8, 4))
    assert {"stem.weight", "long.weight", "odd.weight"} <= graph.stored.keys()


def test_a_size_that_is_rejected_is_told() -> None:
    """Where a larger picture is recorded on request, and the model rejects it."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 8:
                raise ValueError("8 pixels")
            y: Tensor = self.stem(x)
            return y

    graph = engine.trace(Fixed(), torch.zeros(2, 3, 8, 8), explore=True)
    assert any("8 pixels" in note for note in graph.notes)


def test_large_inputs_are_not_run_on_data() -> None:
    """They would take gigabytes: counts of operations that are compared ask for batches of thousands."""
    recorder = EntryRecorder(nn.Identity(), None)
    for batch in (1, 8):
        recorder.run(lambda args, kwargs: args[0] + 1, (torch.zeros(batch, 2000),), {}, [""], "eval")
    with pytest.raises(TooLargeError, match="18000 entries"):
        recorder.run(lambda args, kwargs: args[0] + 1, (torch.zeros(9, 2000),), {}, [""], "eval")
