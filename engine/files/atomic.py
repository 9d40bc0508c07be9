"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_writable", "next_version", "replacing", "save", "unwritable"]

_PREFIX = ".lightning-compress-"
_TEMPORARY = re.compile(rf"{re.escape(_PREFIX)}[0-9a-f]{{32}}(\.[^/]*)?")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], new: bool = False) -> Iterator[Path]:
    """Give a temporary file to write to; it takes the place of a file once it is complete and on the disk.

    At any moment there is the old file or the new one, also if the process is killed or the machine loses power. What
    killed writers left in the folder is removed; a lock says whether a writer is alive.

    Args:
        path: where the file is to be; its folder is made.
        new: whether there may be no file yet.

    Yields:
        The temporary file, in the same folder and with the same ending. What raises leaves the old file as it is.

    Raises:
        FileExistsError: where it is to be new, and there is one by the time that it is complete.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder, "a.txt")) as temporary:
        ...     _ = temporary.write_text("all of it")
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        target.lstat()  # a name that is too long is an error before anything is written
    _remove_leftovers(target.parent)
    temporary, descriptor = _opened(target)
    try:
        yield temporary
        _sync(temporary)
        _rename(temporary, target, new)
        _sync(target.parent)  # the rename itself is safe only once the folder is
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)  # and with it the lock


def _rename(temporary: Path, target: Path, new: bool) -> None:
    if new:
        try:
            os.link(temporary, target)  # unlike a rename, it fails where there is a file
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(target):
                raise FileExistsError(f"{target} exists") from None
        else:
            return
    os.replace(temporary, target)


def _opened(target: Path) -> tuple[Path, int]:
    """Make a temporary file under a name that nobody can have guessed, and lock it for as long as it is written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        temporary = target.with_name(f"{_PREFIX}{secrets.token_hex(16)}{target.suffix[:64]}")
        descriptor = os.open(temporary, flags, 0o666)
        if _locked(descriptor) is not False and _is_at(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for a leftover before it was locked


def _locked(descriptor: int) -> bool | None:
    """Lock a file unless another process has; None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that are gone."""
    for name in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):  # another's, or renamed or removed by another meanwhile
            if stat.S_ISREG((folder / name).lstat().st_mode):
                descriptor = os.open(folder / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if _locked(descriptor) and _is_at(folder / name, descriptor):
                        (folder / name).unlink()
                finally:
                    os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- where there is no room


class _Sink(io.RawIOBase):
    """A file that keeps the first error of the disk: torch would hide it behind one of its own."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest) and self.error is None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self.error = error
        return len(view)


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write as ``torch.save`` does, and raise what the disk says.

    Args:
        value: what to write.
        path: the file.

    Raises:
        OSError: where the disk is full, or a limit is reached.
    """
    with open(path, "wb", buffering=0) as file:
        sink = _Sink(file)
        torch.save(value, sink)  # type: ignore[arg-type]  # it has what torch calls
        if sink.error is not None:
            raise sink.error


def unwritable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Return the error that says that a file could not be written, why, and what to do."""
    reason = error.strerror or str(error)
    return CheckpointError(
        f"{os.fspath(path)} could not be written: {reason}. What was there is as it was. Make room or choose another "
        "folder."
    )


def check_writable(path: str | os.PathLike[str], size: int = 0) -> None:
    """Refuse a file that could not be written: its folder, its name, or the room on the disk.

    Args:
        path: where the file is to be; its folder is made.
        size: bytes that it may take.

    Raises:
        CheckpointError: where it could not.

    Example:
        >>> check_writable("/proc/small.ckpt")
        Traceback (most recent call last):
        ...
        engine.errors.CheckpointError: /proc/small.ckpt could not be written: ...
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            target.lstat()
        temporary, descriptor = _opened(target)
        temporary.unlink()
        os.close(descriptor)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise unwritable(path, error) from error
    if free < size:
        raise CheckpointError(
            f"{target} could not be written: it may take {size / 2**20:.0f} MB, and its disk has "
            f"{free / 2**20:.0f} MB left. Make room or choose another folder."
        )


def next_version(path: str | os.PathLike[str]) -> Path:
    """Return a path at which there is no file yet, numbered as `ModelCheckpoint` does: ``-v1``, ``-v2``, …

    Example:
        >>> next_version("gone/compacted.ckpt").name
        'compacted.ckpt'
    """
    first = target = Path(path)
    number = 0
    while os.path.lexists(target):
        number += 1
        target = first.with_name(f"{first.stem}-v{number}{first.suffix}")
    return target
