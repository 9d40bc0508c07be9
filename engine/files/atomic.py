"""Atomic writing of files."""

from __future__ import annotations

import contextlib
import errno
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
    """Yield a temporary file to write to, and replace the target by it once it is complete and on the disk.

    At any moment, the target is the old file or the new one, even if the process is killed or the machine loses power.
    Temporary files of killed writers in the folder are removed; a lock shows whether a writer is alive.

    Args:
        path: path of the file; its folder is created.
        new: whether it is an error if the file exists.

    Yields:
        The temporary file, in the same folder and with the same ending. If the body raises, the old file is unchanged.

    Raises:
        FileExistsError: with ``new``, if the file exists when the new one is complete.
        NotADirectoryError: if the folder, or one above it, is a file or a link to nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder, "a.txt")) as temporary:
        ...     _ = temporary.write_text("all of it")
    """
    target = Path(path)
    _make_folder(target.parent)
    with contextlib.suppress(FileNotFoundError):
        target.lstat()  # a name that is too long is an error before anything is written
    _remove_leftovers(target.parent)
    temporary, descriptor = _opened(target)
    try:
        yield temporary
        _sync(temporary)
        _rename(temporary, target, new)
        _sync(target.parent)  # the rename is only durable once the folder is synced
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)  # and with it the lock


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # callers take it for the name of the file itself, and try the next one
        raise NotADirectoryError(errno.ENOTDIR, f"{error.filename} is a file or a link to nothing") from error


def _rename(temporary: Path, target: Path, new: bool) -> None:
    if new:
        try:
            os.link(temporary, target)  # unlike a rename, this fails if the file exists
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(target):
                raise FileExistsError(f"{target} exists") from None
        else:
            return
    os.replace(temporary, target)


def _opened(target: Path) -> tuple[Path, int]:
    """Create a temporary file with an unguessable name, and lock it while it is written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        temporary = target.with_name(f"{_PREFIX}{secrets.token_hex(16)}{target.suffix[:64]}")
        descriptor = os.open(temporary, flags, 0o666)
        if _locked(descriptor) is not False and _is_at(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for a leftover before it was locked


def _locked(descriptor: int) -> bool | None:
    """Lock a file unless another process has locked it; None if the file system has no locks."""
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


# ---------------------------------------------------------------- disk errors


class _Sink(io.RawIOBase):
    """A file that stores the first disk error, which torch would replace by its own."""

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
    """Write like ``torch.save``, but raise disk errors unchanged.

    Args:
        value: the value to write.
        path: the file.

    Raises:
        OSError: if the disk is full, or a limit is reached.
    """
    with open(path, "wb", buffering=0) as file:
        sink = _Sink(file)
        torch.save(value, sink)  # type: ignore[arg-type]  # it has the methods that torch calls
        if sink.error is not None:
            raise sink.error


def unwritable(path: str | os.PathLike[str], error: OSError | ValueError) -> CheckpointError:
    """Return the error for a file that could not be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(
        f"{os.fspath(path)} could not be written: {reason}. Existing files are unchanged. Free disk space or choose "
        "another folder."
    )


def check_writable(path: str | os.PathLike[str], size: int = 0) -> None:
    """Check that a file can be written: its folder, its name, and the disk space.

    Args:
        path: path of the file; its folder is created.
        size: maximum size of the file in bytes.

    Raises:
        CheckpointError: if it cannot be written.

    Example:
        >>> check_writable("/proc/small.ckpt")
        Traceback (most recent call last):
        ...
        engine.errors.CheckpointError: /proc/small.ckpt could not be written: ...
    """
    target = Path(path)
    try:
        _make_folder(target.parent)
        with contextlib.suppress(FileNotFoundError):
            target.lstat()
        temporary, descriptor = _opened(target)
        temporary.unlink()
        os.close(descriptor)
        free = shutil.disk_usage(target.parent).free
    except (OSError, ValueError) as error:  # a name may hold no zero
        raise unwritable(path, error) from error
    if free < size:
        raise CheckpointError(
            f"{target} could not be written: it may take {size / 2**20:.0f} MB, but only {free / 2**20:.0f} MB are "
            "free. Free disk space or choose another folder."
        )


def next_version(path: str | os.PathLike[str]) -> Path:
    """Return an unused path, numbered like those of `ModelCheckpoint`: ``-v1``, ``-v2``, …

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
