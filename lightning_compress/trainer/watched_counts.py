"""Counts of batches, epochs and steps that note the numbers with which any code compares them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["WatchedCount"]


class WatchedCount(int):
    """A number that notes the numbers with which it is compared, and by which it is divided.

    Results of adding, subtracting or dividing by an integer are counts, too; if one of these is compared, the first
    value of the original count is noted that may change the outcome.

    Args:
        value: the number.
        noted: the set of noted numbers.
        origin: returns the value of the original count for a value of this one.

    Example:
        >>> noted = set()
        >>> epoch = WatchedCount(0, noted)
        >>> epoch - 2 >= 5, min(epoch / 10, 1.0), epoch % 4 == 3, epoch // 6 > 2
        (False, 0.0, False, False)
        >>> sorted(noted)
        [4, 6, 7, 10, 12]
    """

    _noted: set[int]
    _origin: Callable[[float], float]

    def __new__(cls, value: int, noted: set[int], origin: Callable[[float], float] = float) -> WatchedCount:
        """Create a count."""
        count = super().__new__(cls, value)
        count._noted, count._origin = noted, origin
        return count

    def note(self, other: Any) -> None:
        """Note a number on which a decision depends.

        Args:
            other: any object; it is ignored unless it is a number that counting can reach.
        """
        if isinstance(other, (int, float)) and not isinstance(other, bool) and math.isfinite(other):
            first = self._origin(other)
            self._noted.update(n for n in (math.floor(first), math.ceil(first)) if n > 1)

    def moved(self, value: Any, origin: Callable[[float], float]) -> Any:
        """Return a number computed from this one as a count.

        Args:
            value: the number; unless it is an integer, it is returned unchanged.
            origin: returns the value of this count for a value of the result.
        """
        own = self._origin
        return WatchedCount(value, self._noted, lambda n: own(origin(n))) if type(value) is int else value

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __add__(self, other: Any) -> Any:
        return self.moved(int(self).__add__(other), lambda n: n - other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.moved(int(self).__sub__(other), lambda n: n + other)

    def __floordiv__(self, other: Any) -> Any:
        self.note(other)
        return self.moved(int(self).__floordiv__(other), lambda n: n * other)


def _noting(name: str) -> Callable[[WatchedCount, Any], Any]:
    plain = getattr(int, name)

    def method(self: WatchedCount, other: Any) -> Any:
        self.note(other)
        return plain(self, other)

    return method


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__mod__", "__truediv__", "__divmod__"):
    setattr(WatchedCount, _name, _noting(_name))
