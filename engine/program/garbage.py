"""Python's search for cycles among objects, held back while a graph grows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]

_LOCK = threading.Lock()
_WAITING: list[bool] = []
"""One entry for each body that runs now, in any thread: whether the search was on when it began."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no cycles while the body runs.

    A graph is hundreds of thousands of objects that all stay. Each time that so many are new, the search walks through
    every object of the process, torch's and the user's included, and finds nothing: a third of the time of a network
    of a thousand blocks, and more than linear in their number. What is freed by its count of references is freed as
    ever. Where several threads do so, it goes on when the last of them is done.

    Example:
        >>> with uncollected():
        ...     print(gc.isenabled())
        False
        >>> gc.isenabled()
        True
    """
    with _LOCK:
        _WAITING.append(gc.isenabled() or any(_WAITING))
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            enabled = _WAITING.pop()
            if enabled and not _WAITING:
                gc.enable()
