"""Progress of long computations: a bar on terminals and in notebooks, an occasional line in log files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch

__all__ = ["Lines", "bar", "notice"]

DELAY = 2.0  # seconds that may pass without a sign
EVERY = 15.0  # seconds between two lines in a log file


def bar(total: int, title: str, unit: str, wanted: bool = True) -> AbstractContextManager[Any]:
    """Show the progress of a loop once it takes more than two seconds; on rank 0 only.

    Terminals and notebooks get a tqdm bar, anything else (a log file) a line every fifteen seconds.

    Args:
        total: number of steps.
        title: what is done.
        unit: what a step is, in the plural.
        wanted: whether to show anything.

    Returns:
        A context manager with an object that has ``update(steps)``, or with None where nothing is shown.

    Example:
        >>> with bar(2, "Sensitivity", "evaluations") as shown:
        ...     shown.update(2)
    """
    if not wanted or not _is_first():
        return nullcontext()
    if not (sys.stderr.isatty() or _in_notebook()) or importlib.util.find_spec("tqdm") is None:
        return Lines(total, title, unit)
    tqdm: Any = importlib.import_module("tqdm").tqdm
    return tqdm(total=total, desc=title, unit=f" {unit}", delay=DELAY, leave=False)


class Lines:
    """Progress as lines on stderr.

    Args:
        total: number of steps.
        title: what is done.
        unit: what a step is, in the plural.
    """

    def __init__(self, total: int, title: str, unit: str) -> None:
        self.total, self.title, self.unit = total, title, unit
        self.steps = 0

    def __enter__(self) -> Lines:
        self._start = time.monotonic()
        self._due = self._start + DELAY
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to close."""

    def update(self, steps: int = 1) -> None:
        """Count steps, and write a line where one is due."""
        self.steps += steps
        now = time.monotonic()
        if now < self._due or not self.steps:
            return
        self._due = now + EVERY
        duration = now - self._start
        rest = duration * (self.total - self.steps) / self.steps
        sys.stderr.write(
            f"{self.title}: {self.steps} of {self.total} {self.unit} in {duration:.0f} s, about {rest:.0f} s left\n"
        )


@contextmanager
def notice(message: str, delay: float = DELAY) -> Iterator[None]:
    """Print a message if the body takes longer than two seconds; on rank 0 only.

    Args:
        message: what is being done.
        delay: seconds after which to print it.

    Example:
        >>> with notice("Verifying the compacted network"):
        ...     pass
    """
    if not _is_first():
        yield
        return
    timer = threading.Timer(delay, lambda: sys.stderr.write(f"{message} …\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_first() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _in_notebook() -> bool:
    """Whether an IPython kernel runs this, which shows what is written to stderr below the cell."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or "google.colab" in sys.modules
