"""Limits on the length of runs: a loop that does not end with another value ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import TraceError
from engine.program.trees import list_tensors

__all__ = ["RunLength"]

_LONGER, _MORE = 20, 20_000
"""A run ends after this multiple of the steps of the longest earlier run, plus this number of steps."""

_LONGER_BY_ANSWERS, _MORE_BY_ANSWERS = 4, 400
"""The same for runs with other answers to decisions on data, which are many."""


_LARGER, _MORE_ENTRIES = 8, 2**24
"""A run on data ends after this multiple of the entries that the largest earlier run computed, plus this number."""


class RunLength:
    """Counts the steps of runs of a model: ops, and lines of functions that are watched; and what ops compute on data.

    The first run is not limited. Later ones differ from it in a size or a value, which may be the increment of a loop:
    ``while i < x.size(1): i += self.stride`` does not end if the stride is 0. And a detector that takes every proposal
    for an object computes a hundred times as much.

    Example:
        >>> length = RunLength()
        >>> with length.run(closely=False):
        ...     for _ in range(100_000):
        ...         length.step()
        >>> with length.run(closely=False):
        ...     while True:
        ...         length.step()
        Traceback (most recent call last):
        engine.errors.TraceError: A loop does not end with another value of a number or flag.
    """

    def __init__(self) -> None:
        self._longest, self._steps, self._most = 0, 0, 0
        self._largest, self._entries, self._most_entries = 0, 0, 0

    @contextmanager
    def run(self, closely: bool) -> Iterator[None]:
        """Count the steps of the body as one run.

        Args:
            closely: whether to apply the lower limit for runs with other answers to decisions on data, which are many.
        """
        longer, more = (_LONGER_BY_ANSWERS, _MORE_BY_ANSWERS) if closely else (_LONGER, _MORE)
        self._steps, self._most = 0, longer * self._longest + more if self._longest else 0
        self._entries, self._most_entries = 0, _LARGER * self._largest + _MORE_ENTRIES if self._largest else 0
        yield
        self._longest, self._largest = max(self._longest, self._steps), max(self._largest, self._entries)

    def step(self) -> None:
        """Count a step.

        Raises:
            TraceError: if the run exceeds its limit.
        """
        self._steps += 1
        if 0 < self._most < self._steps:
            raise TraceError("A loop does not end with another value of a number or flag.")

    def compute(self, results: Any) -> None:
        """Count the entries that an op computes on data.

        Args:
            results: of the op.

        Raises:
            TraceError: if there are far more than in any earlier run.
        """
        self._entries += sum(tensor.numel() for tensor in list_tensors(results))
        if 0 < self._most_entries < self._entries:
            raise TraceError("A run computes far more than all others with another value of a number or flag.")
