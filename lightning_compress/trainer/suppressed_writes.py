"""Suppression of writes to files while a step is tried."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["suppressing_writes"]

_WRITING = frozenset("wax+")

_CHANGES: dict[Any, str] = {
    os: "link makedirs mkdir remove removedirs rename renames replace rmdir symlink system truncate unlink",
    shutil: "copy copy2 copyfile copytree move rmtree",
    torch: "save",
}
"""Functions that change files, folders or links; `pathlib` calls those of `os`."""

_WRITERS = {"torch.utils.tensorboard.writer": "FileWriter", "tensorboardX.writer": "FileWriter"}
"""Classes that pass the events of a `SummaryWriter` to a writing thread, by Python module."""


@contextmanager
def suppressing_writes() -> Iterator[None]:
    """Make writing and deleting files, saving with torch, logging and printing in the body's thread have no effect.

    Other threads are not affected, nor are writes to a file that was opened before.

    Example:
        >>> import tempfile
        >>> place = os.path.join(tempfile.mkdtemp(), "notes.txt")
        >>> with suppressing_writes():
        ...     with open(place, "w") as file:
        ...         length = file.write("four")
        ...     os.rename(place, place + ".old")
        >>> length, os.path.exists(place)
        (4, False)
    """
    thread, opens = threading.get_ident(), builtins.open

    def is_tried() -> bool:
        return threading.get_ident() == thread

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        own = is_tried() and not isinstance(file, int) and not _WRITING.isdisjoint(mode)
        return opens(os.devnull if own else file, mode.replace("x", "w") if own else mode, *args, **kwargs)

    with contextlib.ExitStack() as scope:
        for owner in (builtins, io):
            scope.enter_context(_replaced(owner, "open", opening))
        for owner, names in _CHANGES.items():
            for name in names.split():
                scope.enter_context(_replaced(owner, name, _idle(getattr(owner, name), is_tried)))
        for module, writer in _WRITERS.items():
            kind = getattr(sys.modules.get(module), writer, None)
            if kind is not None:
                scope.enter_context(_replaced(kind, "add_event", _idle(kind.add_event, is_tried)))
        scope.enter_context(_replaced(logging.Logger, "handle", _idle(logging.Logger.handle, is_tried)))
        scope.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def _idle(function: Callable[..., Any], is_tried: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that does nothing while a step is tried."""

    def idle(*args: Any, **kwargs: Any) -> Any:
        return None if is_tried() else function(*args, **kwargs)

    return idle


@contextmanager
def _replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Replace an attribute of a Python module or a class inside the context."""
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)
