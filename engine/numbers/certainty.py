"""Places in the code whose numbers the source fixes in one run, but not in another."""

from __future__ import annotations

__all__ = ["Certainty"]


class Certainty:
    """Tracks at which places in the code numbers were fixed by the source.

    One caller may pass a literal to a function, and another one a variable with the same number: the second call
    computes nothing new on the example, but may pass another number in the next call.

    Attributes:
        is_lost: whether the current run passes an unfixed number where all earlier runs passed fixed ones.

    Example:
        >>> certainty = Certainty()
        >>> certainty.note("net.py:3:9", is_fixed=True)
        >>> certainty.start()
        >>> certainty.note("net.py:3:9", is_fixed=False)
        >>> certainty.is_lost
        True
    """

    def __init__(self) -> None:
        self._fixed: set[str] = set()
        self._open: set[str] = set()
        self.is_lost = False

    def start(self) -> None:
        """Begin a run."""
        self.is_lost = False

    def note(self, place: str, is_fixed: bool) -> None:
        """Note a call.

        Args:
            place: file, line and column of the call.
            is_fixed: whether the source fixes all of its numbers.
        """
        if is_fixed:
            self._fixed.add(place)
        elif place not in self._open:
            self._open.add(place)
            self.is_lost |= place in self._fixed
