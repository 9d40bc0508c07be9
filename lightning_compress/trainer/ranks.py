"""Communication between ranks: broadcast results and gathered values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

T = TypeVar("T")


def from_rank_zero(trainer: Trainer, function: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result on all ranks; if it fails, raise on all ranks.

    Args:
        trainer: the Trainer; every rank has to call this function.
        function: called on rank 0 only; its result has to be picklable.

    Raises:
        MisconfigurationException: on the other ranks, with the message of the error of rank 0.
    """
    if trainer.world_size == 1:
        return function()
    result: T | None = None
    failure: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as error:  # re-raised below, once the other ranks know
            failure = error
    result, message = trainer.strategy.broadcast((result, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise MisconfigurationException(f"On rank 0: {message}")
    return result  # type: ignore[return-value]


def gathered(value: T) -> list[T]:
    """Gather the values that all processes pass, by rank; every process of the group has to call this.

    Example:
        >>> gathered("own")
        ['own']
    """
    if not grouped():
        return [value]
    values: list[T] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def grouped() -> bool:
    """Whether this process belongs to a group of processes that can communicate."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Hide the process group inside the context, for code that only one rank runs.

    Synchronised norms, for example, would wait for the other ranks. torch has no switch for this, and creating a group
    of one process is itself a collective call.
    """
    is_initialized = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_initialized = is_initialized
