"""Suspend Python's garbage collector while a graph is built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]

_LOCK = threading.Lock()
_WAITING: list[bool] = []
"""One entry per active context, in any thread: whether collection was enabled when it was entered."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the context.

    A graph consists of hundreds of thousands of objects, none of which becomes garbage. Every time as many are
    allocated, the collector traverses all objects of the process, including torch's and the user's, and frees nothing:
    a third of the time for a network of a thousand blocks, growing faster than linearly. Reference counting frees
    objects as usual. With several threads, collection resumes when the last context exits.

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
