"""The lines of packages' functions that ran: which of the calls in them have received anything.

Functions of packages that define none of the model's classes are not analysed for what did not run. A number that the
model's code chooses and passes to one of them matters only where the function ran.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["PackageLines"]


class PackageLines:
    """Traces the lines of functions until each has run."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[CodeType, set[int]]] = {}

    def watch(self, code: CodeType) -> None:
        """Trace a function; `enter` has to be called for each of its calls, this one included."""
        lines = {line for _, _, line in code.co_lines() if line is not None}
        self._pending.setdefault(id(code), (code, lines))

    def enter(self, frame: FrameType) -> Callable[[FrameType, str, Any], Any] | None:
        """Return a trace function for a call; None for a function that is not watched, or of which all lines ran."""
        _, pending = self._pending.get(id(frame.f_code), (None, set[int]()))
        if not pending:
            return None

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            pending.discard(frame.f_lineno)
            return step

        return step(frame, "call", None)  # type: ignore[no-any-return]

    def ran(self, code: CodeType, first: int, last: int) -> bool:
        """Whether any of some lines ran; all lines of a function that is not watched count.

        Args:
            code: of the function.
            first, last: lines, counted from 1.
        """
        _, pending = self._pending.get(id(code), (None, set[int]()))
        lines = {line for _, _, line in code.co_lines() if line is not None and first <= line <= last}
        return not lines or not lines <= pending
