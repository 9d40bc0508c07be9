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


def from_rank_zero(
    trainer: Trainer, function: Callable[[], T], failure_elsewhere: type[Exception] = MisconfigurationException
) -> T:
    """Call a function on rank 0 and return its result on all ranks; if it fails, raise on all ranks.

    Args:
        trainer: the Trainer; every rank has to call this function.
        function: called on rank 0 only; its result has to be picklable.
        failure_elsewhere: the error to raise on the other ranks.

    Raises:
        Exception: that of the function, on rank 0; elsewhere ``failure_elsewhere`` with its message.
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
        raise failure_elsewhere(f"On rank 0: {message}")
    return result  # type: ignore[return-value]


def together(
    function: Callable[[], T],
    undo: Callable[[], object] | None = None,
    *,
    undoes_itself: bool = False,
    failure_elsewhere: type[Exception] = MisconfigurationException,
) -> T:
    """Call a function on every rank and return this rank's result; if it fails on one, undo it and raise on all.

    No rank goes on before all have called it.

    Args:
        function: called on every rank.
        undo: called on every rank if the function fails on one.
        undoes_itself: whether the function leaves nothing to undo where it fails itself.
        failure_elsewhere: the error to raise where only another rank failed.

    Raises:
        Exception: that of the function, where it failed; elsewhere ``failure_elsewhere`` with its message.

    Example:
        >>> together(lambda: 3)
        3
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # re-raised below, once the other ranks know
        failure = error
    messages = gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed and undo is not None and not (failure is not None and undoes_itself):
        undo()
    if failure is not None:
        raise failure
    if failed:
        raise failure_elsewhere(f"On rank {failed[0][0]}: {failed[0][1]}")
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
