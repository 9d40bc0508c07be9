"""Files stay as they are: what is written while a step is tried goes nowhere."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["unwritten"]

_WRITING = frozenset("wax+")


@contextmanager
def unwritten() -> Iterator[None]:
    """Let the body's thread write files, save with torch and print, to no effect.

    Example:
        >>> import tempfile
        >>> place = os.path.join(tempfile.mkdtemp(), "notes.txt")
        >>> with unwritten():
        ...     with open(place, "w") as file:
        ...         length = file.write("four")
        >>> length, os.path.exists(place)
        (4, False)
    """
    thread, before = threading.get_ident(), (builtins.open, io.open, torch.save)

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        own = threading.get_ident() == thread and not isinstance(file, int) and not _WRITING.isdisjoint(mode)
        return before[0](os.devnull if own else file, mode.replace("x", "w") if own else mode, *args, **kwargs)

    def saving(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            before[2](*args, **kwargs)

    try:
        _set(opening, opening, saving)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        _set(*before)


def _set(opening: Callable[..., Any], io_opening: Callable[..., Any], saving: Callable[..., Any]) -> None:
    builtins.open, io.open, torch.save = opening, io_opening, saving  # type: ignore[assignment]
