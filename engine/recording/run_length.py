"""How long runs go on: a loop that does not end where a value is another one ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import TraceError
from engine.program.trees import list_tensors

__all__ = ["RunLength"]

_LONGER, _MORE = 20, 20_000
"""A run ends after so many times the steps of the longest run before, and so many more."""

_LONGER_BY_ANSWERS, _MORE_BY_ANSWERS = 4, 400
"""The same where decisions on data come out otherwise, of which many are tried."""


_LARGER, _MORE_ENTRIES = 8, 2**24
"""A run on data ends after it has computed so many times the entries of the largest before, and so many more."""


class RunLength:
    """Counts the steps of runs of a model: ops, and lines of functions that are watched; and what ops compute on data.

    The first run goes on as long as it does. Later ones differ from it in a size or a value, and the number that a loop
    counts by may be one of them: ``while i < x.size(1): i += self.stride`` does not end where the stride is 0. And a
    detector that takes each of its proposals for an object computes a hundred times as much.

    Example:
        >>> length = RunLength()
        >>> with length.run(closely=False):
        ...     for _ in range(100_000):
        ...         length.step()
        >>> with length.run(closely=False):
        ...     while True:
        ...         length.step()
        Traceback (most recent call last):
        engine.errors.TraceError: A loop does not end where a value that it depends on is another one.
    """

    def __init__(self) -> None:
        self._longest, self._steps, self._most = 0, 0, 0
        self._largest, self._entries, self._most_entries = 0, 0, 0

    @contextmanager
    def run(self, closely: bool) -> Iterator[None]:
        """Count the steps of the body, which is one run.

        Args:
            closely: whether decisions on data come out otherwise: there are many such runs, so they end earlier.
        """
        longer, more = (_LONGER_BY_ANSWERS, _MORE_BY_ANSWERS) if closely else (_LONGER, _MORE)
        self._steps, self._most = 0, longer * self._longest + more if self._longest else 0
        self._entries, self._most_entries = 0, _LARGER * self._largest + _MORE_ENTRIES if self._largest else 0
        yield
        self._longest, self._largest = max(self._longest, self._steps), max(self._largest, self._entries)

    def step(self) -> None:
        """Count a step.

        Raises:
            TraceError: where the run goes on and on.
        """
        self._steps += 1
        if 0 < self._most < self._steps:
            raise TraceError("A loop does not end where a value that it depends on is another one.")

    def compute(self, results: Any) -> None:
        """Count the entries that an op computes on data.

        Args:
            results: of the op.

        Raises:
            TraceError: where they are far more than in any run before.
        """
        self._entries += sum(tensor.numel() for tensor in list_tensors(results))
        if 0 < self._most_entries < self._entries:
            raise TraceError("A run computes many times as much where a value that it depends on is another one.")
