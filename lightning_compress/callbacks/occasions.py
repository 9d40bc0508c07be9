"""When a model is compacted while training goes on, and whether a fit gets there at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn

import engine
from lightning_compress.callbacks.masking import holders
from lightning_compress.callbacks.timing import length
from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from torch import nn

Occasions = float | tuple[int, ...] | None


def occasions(when: int | float | Sequence[int] | None) -> Occasions:
    """Read the argument ``when`` of `ModelCompaction`: a fraction, epochs, or neither.

    Raises:
        MisconfigurationException: if it is none of these.

    Example:
        >>> occasions(2), occasions([1, 3]), occasions(0.5)
        ((2,), (1, 3), 0.5)
    """
    if when is None or (isinstance(when, float) and 0 < when < 1):
        return when
    epochs = [when] if isinstance(when, (int, float)) else list(when)
    if all(type(epoch) is int and epoch >= 0 for epoch in epochs):
        return tuple(int(epoch) for epoch in epochs)
    raise MisconfigurationException(
        f"`when` is an epoch or a list of epochs from 0 on, or a fraction of the parameters in (0, 1), got {when!r}."
    )


def check_source(when: Occasions, trainer: Trainer, model: nn.Module) -> None:
    """Refuse `when` where nothing in the Trainer can mask anything while training goes on.

    Args:
        when: as `occasions` gives it.
        trainer: the Trainer of the fit.
        model: the model to compact.

    Raises:
        MisconfigurationException: saying what to add.
    """
    if when is None or engine.read_masks(model):
        return
    if not any(holder.first_epoch(trainer) is not None for holder in holders(trainer)):
        raise MisconfigurationException(
            f"`ModelCompaction(when={when!r})` removes what callbacks mask while training goes on, and no callback of "
            "this Trainer masks anything. Add `ChannelPruning`, or leave `when` out: then zeros are removed at the end."
        )


def check_epochs(when: Occasions, trainer: Trainer) -> None:
    """Refuse epochs before anything is masked, and warn of those that the fit does not reach.

    Args:
        when: as `occasions` gives it.
        trainer: the Trainer of the fit, which is about to start.

    Raises:
        MisconfigurationException: where a compaction in none of the epochs could remove anything.
    """
    if not isinstance(when, tuple) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    firsts = [first for holder in holders(trainer) if (first := holder.first_epoch(trainer)) is not None]
    if firsts and when and max(when) < min(firsts):
        raise MisconfigurationException(
            f"`ModelCompaction(when={list(when)})` never removes anything: nothing is masked before epoch "
            f"{min(firsts)}. Compact later, or let pruning start earlier."
        )
    epochs = length(trainer, "epoch")
    late = [] if epochs is None else [epoch for epoch in when if epoch >= epochs]
    if late:
        rank_zero_warn(
            f"`ModelCompaction(when={list(when)})` does not act in epoch {', '.join(map(str, late))}: the fit ends "
            f"after {epochs} epochs, counted from 0. Train longer, or compact earlier; at the end of the fit it "
            "compacts in any case."
        )
