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
    """Give freed memory back to the system, where the C library would keep it between what is still in use.

    Large activations that come and go leave gaps of other sizes than the next ones need, so that the process grows
    although nothing more is in use.

    Returns:
        Whether the C library can.

    Example:
        >>> give_back() in (True, False)
        True
    """
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True
