"""Files and lines as readers know them: ``ultralytics/nn/tasks.py:162``, whichever folder packages are installed in."""

from __future__ import annotations

import functools
import os
import sys

__all__ = ["shown_place"]


def shown_place(place: str) -> str:
    """A file, or a file and a line, relative to the folder that Python imports it from; others as they are.

    Args:
        place: path of a file, with anything behind it.

    Example:
        >>> import json.decoder
        >>> shown_place(f"{json.decoder.__file__}:33")
        'json/decoder.py:33'
        >>> shown_place("<stdin>:1")
        '<stdin>:1'
    """
    current = "" if all(map(os.path.isabs, sys.path)) else os.getcwd()
    inside = [folder for folder in _folders(tuple(sys.path), current) if place.startswith(folder)]
    return place.removeprefix(max(inside, key=len, default="")).replace(os.sep, "/") if inside else place


@functools.lru_cache(maxsize=4)
def _folders(entries: tuple[str, ...], current: str) -> list[str]:
    """Return folders as paths begin; a relative one, such as ``""``, lies in the current folder."""
    return [os.path.join(os.path.normpath(os.path.join(current, entry)), "") for entry in entries]
