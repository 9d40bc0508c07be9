"""Python's search for cycles among objects, held back while a graph grows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no cycles while the body runs.

    A graph is hundreds of thousands of objects that all stay. Each time that so many are new, the search walks through
    every object of the process, torch's and the user's included, and finds nothing: a third of the time of a network
    of a thousand blocks, and more than linear in their number. What is freed by its count of references is freed as
    ever.

    Example:
        >>> with uncollected():
        ...     print(gc.isenabled())
        False
        >>> gc.isenabled()
        True
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
