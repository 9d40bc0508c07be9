"""Decisions that all ranks of a run share."""

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
    """What a function returns on rank 0, on all ranks; where it fails there, all fail instead of waiting for ever.

    Args:
        trainer: the Trainer; every rank has to come here.
        function: is called on rank 0 alone; what it returns has to be picklable.

    Raises:
        MisconfigurationException: on the other ranks, with the message of rank 0, which raises its own error.
    """
    if trainer.world_size == 1:
        return function()
    result: T | None = None
    failure: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as error:  # raised again below, once no other rank waits for this one
            failure = error
    result, message = trainer.strategy.broadcast((result, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise MisconfigurationException(f"On rank 0: {message}")
    return result  # type: ignore[return-value]


@contextmanager
def alone() -> Iterator[None]:
    """Let code inside the context find no other processes, such as synchronised norms, which would wait for them.

    For code that one rank runs by itself. torch has no switch for this: a group of one process takes all ranks to make.
    """
    asked = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_initialized = asked
