"""Memory that was freed but is still held by the C library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["give_back"]


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; other libraries have none."""
    try:
        malloc_trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no such function, no such library, no such call (Windows)
        return None
    return malloc_trim


def give_back() -> bool:
    """Return freed memory to the system that the C library would otherwise keep.

    Large short-lived activations leave gaps of sizes that the next ones cannot use, so the process grows although no
    more memory is in use.

    Returns:
        Whether the C library supports this.

    Example:
        >>> give_back() in (True, False)
        True
    """
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True
