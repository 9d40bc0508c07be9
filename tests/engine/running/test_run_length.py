"""Runs that would never end: a value that a loop counts by is tried at 0, or below."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine.errors import TraceError
from engine.running.run_length import RunLength
from tests.engine.exactness import channel_masks, check_exact


def test_a_run_that_goes_on_and_on_is_broken_off() -> None:
    """The first takes what it takes; later ones may be longer, but not endless."""
    length = RunLength()
    with length.run(closely=False):
        for _ in range(100_000):
            length.step()
    with length.run(closely=False):
        for _ in range(1_000_000):
            length.step()
    with pytest.raises(TraceError, match="loop does not end"), length.run(closely=False):
        while True:
            length.step()


def test_runs_with_other_answers_are_limited_more_closely() -> None:
    """There are many of them."""
    length = RunLength()
    with length.run(closely=True):
        length.step()
    with pytest.raises(TraceError, match="loop does not end"), length.run(closely=True):
        for _ in range(1000):
            length.step()
    with length.run(closely=False):
        for _ in range(1000):
            length.step()


def test_a_run_that_computes_many_times_as_much_is_broken_off() -> None:
    """A detector that takes each proposal for an object; what small networks compute is never too much."""
    length, large = RunLength(), torch.empty(2**24, device="meta")
    for _ in range(2):
        with length.run(closely=False):
            length.compute((large, [large]))
    with pytest.raises(TraceError, match="far more than all others"), length.run(closely=False):
        for _ in range(18):
            length.compute(large)
    with length.run(closely=False):
        for _ in range(17):
            length.compute(large)


class _Windows(nn.Module):
    """Cuts tokens into windows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.stride = nn.Linear(6, 8), nn.Linear(8, 3), 2

    def windows(self, h: Tensor) -> Iterator[Tensor]:
        """Yield one after the other."""
        start = 0
        while start < h.size(1):
            yield h[:, start : start + self.stride]
            start += self.stride

    def forward(self, x: Tensor) -> Tensor:
        """Classify each token."""
        return torch.cat([self.head(part) for part in self.windows(self.embed(x))], 1)


class _Countdown(_Windows):
    """Counts the windows before it cuts them: no op runs in its loop."""

    def forward(self, x: Tensor) -> Tensor:
        """Classify each token."""
        parts, left = 0, 12
        while left > 0:
            parts, left = parts + 1, left - self.stride
        return self.head(self.embed(x)) / parts


@pytest.mark.parametrize("kind", [_Windows, _Countdown])
def test_loops_that_count_by_an_attribute(kind: type[nn.Module]) -> None:
    """At a stride of 0 they do not end."""
    model = kind().double().eval()
    check_exact(model, channel_masks(model, seed=0), *(torch.randn(2, n, 6, dtype=torch.double) for n in (5, 8)))
