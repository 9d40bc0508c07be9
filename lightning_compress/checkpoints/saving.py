"""Saving of the compacted checkpoint of a fit: a check of the disk before the fit, the same error on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from engine.errors import CheckpointError
from engine.files import check_writable
from engine.program import stored_tensors
from lightning_compress.checkpoints import compacted as files
from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

__all__ = ["bytes_of", "check_room", "save"]


def check_room(trainer: Trainer, path: Path, size: int = 0) -> None:
    """Check before a fit, on all ranks, that a file can be written after it.

    Args:
        trainer: the Trainer; every rank has to call this function.
        path: the file.
        size: maximum size of the file in bytes.

    Raises:
        MisconfigurationException: if it cannot be written.
    """
    failure: str | None = None
    if trainer.is_global_zero:
        try:
            check_writable(path, size)
        except CheckpointError as error:
            failure = str(error)
    failure = trainer.strategy.broadcast(failure)
    if failure is not None:
        raise MisconfigurationException(failure)


def bytes_of(module: nn.Module) -> int:
    """Return the size in bytes of the parameters and buffers of a module, without uninitialised ones.

    Example:
        >>> bytes_of(nn.Linear(2, 3))
        36
    """
    stored = {id(tensor): tensor for tensor in stored_tensors(module).values() if not is_lazy(tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def save(trainer: Trainer, checkpoint: Mapping[str, Any], path: Path, alone: bool) -> str | None:
    """Write a checkpoint on rank 0, under the next free name.

    Args:
        trainer: the Trainer; every rank has to call this function, unless it is ``alone``.
        checkpoint: the content, with plans under its own key.
        path: the file; if it exists, ``-v1`` is appended to its name, and so on.
        alone: whether the other ranks may be gone.

    Returns:
        The path of the file; None on other ranks that are alone.

    Raises:
        CheckpointError: on all ranks, if it cannot be written; no partial file remains then.
    """
    target: str | None = None
    reason: str | None = None
    cause: Exception | None = None
    if trainer.is_global_zero:
        try:
            target = str(files.write_new(checkpoint, path))
        except Exception as error:  # raised below, once the other ranks know
            cause, reason = error, str(error)
    if not alone:
        target, reason = trainer.strategy.broadcast((target, reason))
    if reason is not None:
        raise CheckpointError(f"The model is compacted, but its checkpoint could not be written. {reason}") from cause
    return target
