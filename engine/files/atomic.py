"""Files that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary file to write to; it takes the place of a file once it is complete and on the disk.

    At any moment there is the old file or the new one, also if the process is killed or the machine loses power.

    Args:
        path: where the file is to be; its folder is made.

    Yields:
        The temporary file, in the same folder and with the same ending. What raises leaves the old file as it is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder, "a.txt")) as temporary:
        ...     _ = temporary.write_text("all of it")
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)  # the rename itself is safe only once the folder is
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
