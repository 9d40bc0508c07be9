"""The states of optimizers across a compaction: narrowed along with the parameters, or emptied at the end of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from engine.compaction import is_entrywise

__all__ = ["narrowed_along"]


@contextmanager
def narrowed_along(optimizers: Sequence[Optimizer], training: bool) -> Iterator[list[Optimizer]]:
    """Yield the optimizers whose states the body has to narrow; empty those of the others if it narrows parameters.

    If training continues, these are all optimizers, so that one that would train differently is refused.

    Args:
        optimizers: optimizers of the Trainer.
        training: whether training continues.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(2, 2))]
        >>> with narrowed_along([torch.optim.LBFGS(weights), torch.optim.SGD(weights)], training=False) as narrowed:
        ...     [type(optimizer).__name__ for optimizer in narrowed]
        ['SGD']
    """
    narrowed = [optimizer for optimizer in optimizers if training or is_entrywise(optimizer)]
    others = [optimizer for optimizer in optimizers if all(optimizer is not own for own in narrowed)]
    before = list(map(_sizes, others))
    yield narrowed
    for optimizer, sizes in zip(others, before, strict=True):
        if optimizer.state and _sizes(optimizer) != sizes:
            optimizer.state.clear()
            rank_zero_warn(
                f"The state of {type(optimizer).__name__} cannot be narrowed with the parameters and was "
                "emptied: training that continues from the compacted checkpoint starts with a new state."
            )


def _sizes(optimizer: Optimizer) -> list[torch.Size]:
    return [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
