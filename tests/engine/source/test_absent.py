"""Which attributes a function may set while they are None."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.source.absent import assigned_where_none


class Net(nn.Module):
    """Sets attributes in all ways."""

    head: Any
    side: Any
    other: Any

    def replaces(self, width: int, on: bool) -> None:
        """Replace what is there, and remove it."""
        if on and self.head is not None:
            self.head = nn.Linear(width, 2)
            self.head.bias = None
        self.side = None

    def fills(self, part: Any) -> None:
        """Set what may be missing."""
        if self.head is not None or part:
            self.head = part
        if part.side is not None:
            self.side = part
        if self.other is None:
            self.other = part

    def fills_later(self) -> Any:
        """Set it in a function of its own, which may run after it was removed."""
        if self.head is not None:

            def later() -> None:
                self.head = 1

            return later
        return None

    def fills_beside(self) -> None:
        """Set it where it is missing, and several at once."""
        if self.head is not None:
            pass
        else:
            self.head = 1
        self.side, self.other = None, None

    def by_name(self, name: str) -> None:
        """Set whatever a text names."""
        setattr(self, name, 1)


def test_what_stays_none() -> None:
    """To assign None, or in the place of something, leaves None as it is."""
    names = {
        name: assigned_where_none(getattr(Net, name).__code__)
        for name in ("replaces", "fills", "fills_later", "fills_beside", "by_name")
    }
    assert names == {
        "replaces": frozenset(),
        "fills": frozenset({"head", "side", "other"}),
        "fills_later": frozenset({"head"}),
        "fills_beside": frozenset({"head", "side", "other"}),
        "by_name": None,
    }


def test_without_source() -> None:
    """Nothing is said of a function whose source is not there."""
    space: dict[str, Any] = {}
    exec("def add(self):\n    self.head = None", space)
    assert assigned_where_none(space["add"].__code__) is None
