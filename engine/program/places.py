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
    folders = map(_folder, sys.path) if all(map(os.path.isabs, sys.path)) else map(_folder.__wrapped__, sys.path)
    inside = [folder for folder in folders if place.startswith(folder)]
    return place.removeprefix(max(inside, key=len, default="")).replace(os.sep, "/") if inside else place


@functools.lru_cache(maxsize=256)
def _folder(entry: str) -> str:
    """Return a folder as a path begins; a relative one, such as ``""``, follows the current folder."""
    return os.path.join(os.path.abspath(entry), "")
