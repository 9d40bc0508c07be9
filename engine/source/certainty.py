"""Places in the code whose numbers the source fixes in one run, and does not in another."""

from __future__ import annotations

__all__ = ["Certainty"]


class Certainty:
    """Where numbers were fixed, and where not.

    A function may be passed a literal by one caller, and a variable that holds the same number by another: the second
    call computes nothing new on the example, and yet another number in the next call.

    Attributes:
        is_lost: whether the present run passes a number that is not fixed where all runs before passed fixed ones.

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
        """Take note of a call.

        Args:
            place: file, line and column of the call.
            is_fixed: whether the source fixes all of its numbers.
        """
        if is_fixed:
            self._fixed.add(place)
        elif place not in self._open:
            self._open.add(place)
            self.is_lost |= place in self._fixed
