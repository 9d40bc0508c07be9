"""Notes on branches that no recording, or not every round, took: where they are, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.program.places import shown_place

__all__ = ["BranchNotes", "listed", "notes_on_modules", "reason_of_reading", "reason_of_replacing"]

_MOST_NAMES = 6
_ADVICE = "Pass an example, or an entry, that runs it."


class BranchNotes:
    """Places of branches that no recording, or not every round, took, in the order of the analysis.

    Attributes:
        read: places of branches whose inputs keep all channels.
        left_out: places of conditions that held in all recordings, or in some rounds, both of whose sides keep all.
        not_analyzed: places of branches that do what is not analyzed.
        options: arguments that such conditions test, and that `constants` could declare.

    Example:
        >>> notes = BranchNotes()
        >>> notes.read["net.py:7"] = None
        >>> notes.options["embed"] = None
        >>> notes.messages()[1]  # doctest: +ELLIPSIS
        "Such code depends on these arguments of the model: embed. If they never change, declare them: ..."
    """

    def __init__(self) -> None:
        self.read: dict[str, None] = {}
        self.left_out: dict[str, None] = {}
        self.not_analyzed: dict[str, None] = {}
        self.options: dict[str, None] = {}

    def messages(self) -> list[str]:
        """Return messages that name the places of the branches, and the arguments to declare."""
        messages = []
        if self.read:
            places = listed(map(shown_place, self.read))
            messages.append(
                f"Code that did not run, or only in some rounds; its inputs keep all channels: {places}. {_ADVICE}"
            )
        if self.left_out:
            places = listed(map(shown_place, self.left_out))
            messages.append(
                f"Conditions that may be false in another call or round; both sides keep all channels: {places}. "
                f"{_ADVICE}"
            )
        if self.options and (self.read or self.left_out):
            messages.append(
                f"Such code depends on these arguments of the model: {listed(self.options)}. If they never change, "
                f"declare them: `constants={list(self.options)[:_MOST_NAMES]}`."
            )
        if others := [shown_place(place) for place in self.not_analyzed if place not in self.read]:
            messages.append(f"Code that did not run and was not analyzed: {listed(others)}. {_ADVICE}")
        return messages


def reason_of_reading(place: str, has_run: bool) -> str:
    """Return why a value stays that code at a place may read.

    Args:
        place: file and line.
        has_run: whether the code ran in other rounds of a loop or in other calls.
    """
    ran = "ran only in some rounds or calls" if has_run else "did not run"
    return f"could be read by the code at {shown_place(place)}, which {ran}"


def reason_of_replacing(place: str) -> str:
    """Return why a value stays that goes on where the condition at a place comes out otherwise.

    Example:
        >>> reason_of_replacing("unet.py:12")
        'may take the place of what is computed behind the condition at unet.py:12'
    """
    return f"may take the place of what is computed behind the condition at {shown_place(place)}"


def listed(items: Iterable[str]) -> str:
    """Return the first six items, separated by commas, and how many more there are.

    Args:
        items: the items.

    Example:
        >>> listed("abcdefgh")
        'a, b, c, d, e, f and 2 more'
    """
    names = list(items)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def notes_on_modules(idle: Iterable[str], methods: Iterable[str]) -> list[str]:
    """Return messages about modules that did not run, and about methods that were not recorded.

    Args:
        idle: names of modules.
        methods: names of methods that read layers.

    Example:
        >>> notes_on_modules(["head"], [])
        ['Modules that did not run and keep all channels: head.']
    """
    notes = []
    if idle := [name for name in idle if name]:  # the model itself ran, whatever parameter of it nothing reads
        notes.append(f"Modules that did not run and keep all channels: {listed(idle)}.")
    if methods := list(methods):
        notes.append(
            f"Methods that read layers and were not recorded: {listed(methods)}. If code outside of the model calls "
            "them, record them as `entries`."
        )
    return notes
