"""Write the compacted checkpoint of a fit: room for it before, one clear error on all ranks after."""

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
    """Refuse, on all ranks and before the fit, a file that could not be written after it.

    Args:
        trainer: the Trainer; every rank has to come here.
        path: the file.
        size: bytes that it may take.

    Raises:
        MisconfigurationException: saying why it cannot be written.
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
    """Return how many bytes the parameters and buffers of a module take; without those that have no shape yet.

    Example:
        >>> bytes_of(nn.Linear(2, 3))
        36
    """
    stored = {id(tensor): tensor for tensor in stored_tensors(module).values() if not is_lazy(tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def save(trainer: Trainer, checkpoint: Mapping[str, Any], path: Path, alone: bool) -> str | None:
    """Write a checkpoint on rank 0, under the next name that is free.

    Args:
        trainer: the Trainer; every rank has to come here, unless it is ``alone``.
        checkpoint: the content, with plans under its own key.
        path: the file; where there is one, ``-v1`` goes behind its name, and so on.
        alone: whether the other ranks may be gone.

    Returns:
        The file; None on another rank that is alone.

    Raises:
        CheckpointError: on all ranks alike, if it cannot be written; nothing is left of it then.
    """
    target: str | None = None
    reason: str | None = None
    cause: Exception | None = None
    if trainer.is_global_zero:
        try:
            target = str(files.write_new(checkpoint, path))
        except Exception as error:  # of any kind, and raised below: the other ranks wait for what is said here
            cause, reason = error, str(error)
    if not alone:
        target, reason = trainer.strategy.broadcast((target, reason))
    if reason is not None:
        raise CheckpointError(f"The model is compacted, and its checkpoint could not be written. {reason}") from cause
    return target
